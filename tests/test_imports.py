"""The import rules of docs/architecture.md, checked over the syntax tree of every module of the package."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = frozenset({"upstream", "storage", "edge", "admin", "jobs", "telemetry", "demo"})
#: What each part may import of ours, besides itself. Parts that are not named here may import everything.
ALLOWED: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "ports": frozenset({"core"}),
    "tasks": frozenset(),
    "following": frozenset({"core", "tasks"}),
    "settings": frozenset({"core"}),
    "pipeline": frozenset({"core", "ports", "telemetry.steps"}),
    **dict.fromkeys(ADAPTERS, frozenset({"core", "ports", "telemetry.steps"})),
}
COMPOSERS = frozenset(
    {
        "app",
        "administration",
        "all_workers",
        "alerts",
        "crash",
        "overlay",
        "reload",
        "start",
        "demonstration",
        "fleets",
        "gauges",
        "gpu",
        "sharing",
        "traces",
        "upstreams",
        "workers",
        "cli",
        "commands",
    }
)
IMPURE = frozenset({"asyncio", "os", "time", "random", "logging"})
IO_LIBRARIES = frozenset(
    {"aiohttp", "sqlalchemy", "redis", "litellm", "asyncpg", "aiosqlite", "socket", "subprocess"}
)
#: (module, what it may do, although others may not)
READS_ENVIRONMENT = frozenset({"gateway.settings.load"})
WRITES_ENVIRONMENT = frozenset(
    {"gateway.upstream.litellm"}
)  # LITELLM_LOCAL_MODEL_COST_MAP, before its import


@dataclass(frozen=True)
class Import:
    module: str  # who imports
    target: str  # what, as far as it is a module: "gateway.core.money", "os"
    line: int
    runtime: bool  # False under `if TYPE_CHECKING:`
    at_top: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text("utf-8"), str(path))
    return found


MODULES = modules()


def imports_of(module: str, tree: ast.Module) -> Iterator[Import]:
    def visit(node: ast.AST, runtime: bool, at_top: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, runtime, at_top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(
                    module, full if full in MODULES else str(node.module), node.lineno, runtime, at_top
                )
        inside = not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, runtime and not checking, at_top and inside)

    return visit(tree, True, True)


IMPORTS = [found for module, tree in MODULES.items() for found in imports_of(module, tree)]


def part(module: str) -> str:
    """ "gateway.core.money" -> "core"; "gateway" -> ""."""
    return module.removeprefix("gateway").removeprefix(".").partition(".")[0]


def inside(target: str, prefix: str) -> bool:
    return target == prefix or target.startswith(f"{prefix}.")


def test_every_part_has_a_rule() -> None:
    parts = {part(m) for m in MODULES} - {""}
    assert parts - ALLOWED.keys() - COMPOSERS == set()


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_part_imports_of_ours_only_what_it_may(name: str) -> None:
    allowed = [f"gateway.{p}" for p in (name, *ALLOWED[name])]
    assert [
        str(i)
        for i in IMPORTS
        if part(i.module) == name
        and inside(i.target, "gateway")
        and i.target != "gateway"  # only the version is there
        and not any(inside(i.target, a) for a in allowed)
    ] == []


def test_the_core_does_no_io_and_asks_no_clock() -> None:
    forbidden = IMPURE | IO_LIBRARIES
    assert [
        str(i) for i in IMPORTS if part(i.module) == "core" and i.target.partition(".")[0] in forbidden
    ] == []


def test_the_pipeline_does_no_io_of_its_own() -> None:
    forbidden = IO_LIBRARIES | {"os", "random"}
    assert [
        str(i) for i in IMPORTS if part(i.module) == "pipeline" and i.target.partition(".")[0] in forbidden
    ] == []


def test_there_is_no_import_cycle() -> None:
    # Imports inside of functions count: they are how cycles hide.
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for i in IMPORTS:
        if i.runtime and i.target in MODULES and i.target not in ("gateway", i.module):
            graph[i.module].add(i.target)
    for module in MODULES:  # a package's own __init__ may import its modules, which import each other by name
        graph[module].discard(module.rpartition(".")[0])
    graphlib.TopologicalSorter(graph).prepare()


def environment_uses(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node
        elif isinstance(node, ast.Name) and node.id in ("environ", "getenv"):
            yield node


def test_only_settings_read_the_environment() -> None:
    users = {module for module, tree in MODULES.items() if any(environment_uses(tree))}
    assert users - WRITES_ENVIRONMENT == READS_ENVIRONMENT
    for module in WRITES_ENVIRONMENT & MODULES.keys():
        tree = MODULES[module]
        writes = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and "os.environ" in ast.unparse(node.targets[0])
        ]
        assert [ast.unparse(w) for w in writes] == ["os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] = 'True'"]
        assert len(list(environment_uses(tree))) == 1


def test_only_settings_read_configuration_files() -> None:
    assert {i.module for i in IMPORTS if inside(i.target, "yaml")} == {
        "gateway.settings.load",
        "gateway.settings.yaml_marks",
    }


def test_litellm_has_one_door_and_is_never_loaded_by_an_import() -> None:
    users = [i for i in IMPORTS if inside(i.target, "litellm")]
    assert {i.module for i in users} <= {"gateway.upstream.litellm"}
    assert [str(i) for i in users if i.at_top and i.runtime] == []
    assert [str(i) for i in users if "proxy" in i.target] == []


def test_background_tasks_have_owners() -> None:
    """`asyncio.create_task` and its like appear only where the task is kept and awaited."""
    starters = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future")
    }
    assert {m for m in starters if part(m) in ("core", "pipeline")} == set()


def test_files_and_functions_stay_readable() -> None:
    long_files = {
        str(path.relative_to(ROOT)): count
        for path in (ROOT / "gateway").rglob("*.py")
        if (count := len(path.read_text("utf-8").splitlines())) > 520
    }
    long_functions = [
        f"{module}.{node.name}: {node.end_lineno - node.lineno}"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno > 85
    ]
    assert (long_files, long_functions) == ({}, [])
