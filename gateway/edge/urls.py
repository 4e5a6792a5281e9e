"""The URL table: which address means what. Pure; one look-up per request.

`/v1/...`, the same without `/v1`, and both under `/t/<task>/` (the base URL is the only knob that some agents
have, so it may name the task).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

from gateway.core.catalog import Operation

_POST = {op.path: op for op in Operation}
#: Addresses that answer 200 to anyone: probes of clients and of load balancers.
_PROBES = frozenset({"/", "/api/hello", "/livez", "/readyz"})
#: What may follow a task's id.
_TASK_VERBS = frozenset({"budgets", "outcome", "done"})


@dataclass(frozen=True, slots=True)
class Target:
    """What an address stands for: a model call, the model list, one model, a task's desk, a probe, or nothing.

    `dialect` is how errors are written: "openai", "responses" or "anthropic".
    """

    kind: str  # "call" | "models" | "model" | "task" | "request" | "prefix" | "probe" | "none"
    dialect: str
    methods: tuple[str, ...] = ()
    operation: Operation | None = None
    name: str = ""  # the model's name, the task or request that is looked at, or the probe's path
    task: str | None = None
    verb: str = (
        ""  # of a task: "declare" | "show" (PATCH: "change") | "budgets" | "outcome" | "done" | "artifact"
    )
    part: str = ""  # the artifact's hash


def resolve(path: str, anthropic_hint: bool) -> Target:
    """The target of a URL path (percent-encoded). `anthropic_hint`: the request has an anthropic-version header."""
    known = _CALLS.get(path)
    if known is not None:
        return known
    task = None
    if path.startswith("/t/"):
        name, slash, rest = path[3:].partition("/")
        if name:
            task, path = unquote(name), slash + rest
    if path.startswith("/v1/"):
        path = path[3:]
    elif path == "/v1":
        path = "/"
    if len(path) > 1 and path.endswith("/"):
        path = path[:-1]
    operation = _POST.get(path)
    if operation is not None:
        return Target("call", dialect_of(operation), ("POST",), operation, task=task)
    dialect = "anthropic" if anthropic_hint or path.startswith("/messages") else "openai"
    if path == "/models":
        return Target("models", dialect, ("GET", "HEAD"), task=task)
    if path.startswith("/models/"):
        return Target("model", dialect, ("GET", "HEAD"), name=unquote(path[8:]), task=task)
    if path == "/tasks":
        return Target("task", "openai", ("POST",), task=task, verb="declare")
    if path.startswith("/tasks/"):
        name, slash, verb = path[7:].partition("/")
        if not slash:
            methods = ("GET", "HEAD", "PATCH")
            return Target("task", "openai", methods, name=unquote(name), task=task, verb="show")
        if name and verb.startswith("artifacts/"):
            part = unquote(verb.removeprefix("artifacts/"))
            return Target(
                "task", "openai", ("GET", "HEAD"), name=unquote(name), task=task, verb="artifact", part=part
            )
        if name and verb in _TASK_VERBS:
            return Target("task", "openai", ("POST",), name=unquote(name), task=task, verb=verb)
    if path.startswith("/requests/") and path.endswith("/prefix") and path.count("/") == 3:
        return Target("prefix", "openai", ("GET", "HEAD"), name=unquote(path[10:-7]), task=task)
    if path.startswith("/requests/") and path.count("/") == 2 and len(path) > 10:
        return Target("request", "openai", ("GET", "HEAD"), name=unquote(path[10:]), task=task)
    if path in _PROBES:
        return Target("probe", dialect, ("GET", "HEAD"), name=path, task=task)
    return Target("none", dialect, task=task)


def dialect_of(operation: Operation) -> str:
    if operation.anthropic:
        return "anthropic"
    return "responses" if operation is Operation.RESPONSES else "openai"


#: As they come most: with and without `/v1`, no task in the path.
_CALLS = {
    prefix + path: Target("call", dialect_of(operation), ("POST",), operation)
    for path, operation in _POST.items()
    for prefix in ("/v1", "")
}
