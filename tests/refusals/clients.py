"""The real clients of ../shared/clients: how each is run against a gateway, and where it comes from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

INSTALL_TIMEOUT_S = 900

#: What a tool-using agent is asked: the demo provider has it call tools six times.
PROMPT = "Run the command 'echo hi', then say done. demo:tools=6"


@dataclass(frozen=True, slots=True)
class Client:
    """One run of one client. `fits`: calls that its key's budget has room for.

    `asks`: requests that it means to send after those, each of which may be refused once; an agent means one.
    """

    name: str
    surface: str
    script: str
    package: str  # "npm NAME@VERSION" or "pip ENVIRONMENT: NAME==VERSION ..."
    program: str = ""  # for $CLIENT_BIN, or the interpreter that runs the script
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    with_v1: bool = True
    fits: int = 3
    asks: int = 1
    library: str = ""  # of a package with several: the one whose version it is

    @property
    def version(self) -> str:
        _, _, rest = self.package.partition(f"{self.library}==" if self.library else " ")
        return rest.partition(" ")[0] if self.library else rest.replace("==", "@").rpartition("@")[2]


_SURFACES = "chat,chat-stream,tools,responses,responses-stream"
_MESSAGES = "messages,stream,tools,cache"
_FRAMEWORKS = (
    "pip frameworks: langchain-openai==1.7.4 langchain-anthropic==1.7.10 openai-agents==0.24.0 "
    "pydantic-ai-slim[openai,anthropic]==2.68.0"
)
_SDKS = "pip sdks: openai==3.57.0 anthropic==2.14.0"
_MINI = "pip mini: mini-swe-agent==2.4.6"
_OPENCODE, _COPILOT = "npm opencode-ai@1.18.33", "npm @github/copilot@1.0.102"


def _framework(case: str) -> Client:
    library = {"agents": "Agents SDK", "pydantic": "pydantic-ai", "langchain": "LangChain"}
    name, _, surface = case.partition("-")
    # One call without tools is a run of LangChain's; the others' second step is refused.
    fits = 0 if name == "langchain" else 1
    package = {
        "agents": "openai-agents",
        "pydantic": "anthropic]",
        "langchain": "langchain-anthropic" if surface == "anthropic" else "langchain-openai",
    }
    return Client(
        library[name],
        surface,
        "frameworks.py",
        _FRAMEWORKS,
        "python",
        (case,),
        fits=fits,
        library=package[name],
    )


CLIENTS = (
    Client(
        "openai (Python)",
        "chat, responses",
        "openai_python.py",
        _SDKS,
        "python",
        (_SURFACES,),
        asks=2,
        library="openai",
    ),
    Client(
        "openai (Node)",
        "chat, responses",
        "openai_node.mjs",
        "npm openai@7.59.0",
        "node",
        (_SURFACES,),
        asks=2,
    ),
    Client(
        "anthropic (Python)", "messages", "anthropic_python.py", _SDKS, "python", (_MESSAGES,), with_v1=False, library="anthropic"
    ),
    Client(
        "@anthropic-ai/sdk",
        "messages",
        "anthropic_node.mjs",
        "npm @anthropic-ai/sdk@1.14.0",
        "node",
        ("messages,stream,tools,messages",),
        with_v1=False,
    ),
    *map(
        _framework,
        ("langchain-chat", "langchain-anthropic", "agents-chat", "agents-responses", "pydantic-chat",
         "pydantic-responses", "pydantic-anthropic"),
    ),
    Client(
        "Claude Code",
        "messages",
        "claude_code.sh",
        "npm @anthropic-ai/claude-code@2.1.332",
        "claude",
        with_v1=False,
    ),
    Client("Codex", "responses", "codex.sh", "npm @openai/codex@0.171.0", "codex"),
    Client("opencode", "chat", "opencode.sh", _OPENCODE, "opencode"),
    Client(
        "opencode",
        "responses",
        "opencode.sh",
        _OPENCODE,
        "opencode",
        variables={"OPENCODE_NPM": "@ai-sdk/openai"},
    ),
    Client("Copilot CLI", "chat", "copilot.sh", _COPILOT, "copilot"),
    Client(
        "Copilot CLI",
        "messages",
        "copilot.sh",
        _COPILOT,
        "copilot",
        variables={"COPILOT_TYPE": "anthropic"},
        with_v1=False,
    ),
    Client("Cline", "chat", "cline.sh", "npm cline@3.0.65", "cline"),
    Client("mini-swe-agent", "chat", "mini_swe_agent.sh", _MINI, "mini"),
    Client(
        "mini-swe-agent",
        "responses",
        "mini_swe_agent.sh",
        _MINI,
        "mini",
        variables={"MINI_PREFIX": "openai/responses"},
    ),
    Client(
        "mini-swe-agent",
        "messages",
        "mini_swe_agent.sh",
        _MINI,
        "mini",
        variables={"MINI_PREFIX": "anthropic"},
        with_v1=False,
    ),
    Client("aider", "chat", "aider.sh", "pip aider: aider-chat==0.86.2", "aider", fits=0),
)  # fmt: skip


class Absent(Exception):
    """This client cannot be had here; the message says why."""


@dataclass(slots=True)
class Packages:
    """Installs by name below `directory`, once, and says no from then on where it could not."""

    directory: Path
    install: bool
    _failed: dict[str, str] = field(default_factory=dict)

    def program(self, client: Client) -> Path:
        """The program to run. Raises `Absent`."""
        kind, _, what = client.package.partition(" ")
        if kind == "npm":
            home = self.directory / "node"
            if client.program == "node":
                self._need(client.package, home / "node_modules" / what.rpartition("@")[0], home)
                return Path(shutil.which("node") or "node")
            return self._need(client.package, home / "node_modules" / ".bin" / client.program, home)
        environment = self.directory / "py" / what.partition(":")[0]
        if client.program == "python":
            first = what.partition(": ")[2].partition("==")[0].replace("-", "_")
            self._need(
                client.package,
                next(environment.glob(f"lib/*/site-packages/{first}"), environment / first),
                environment,
            )
            return environment / "bin" / "python"
        return self._need(client.package, environment / "bin" / client.program, environment)

    def modules(self) -> Path:
        return self.directory / "node"

    def _need(self, package: str, found: Path, where: Path) -> Path:
        if found.exists():
            return found
        if package not in self._failed:
            self._failed[package] = self._get(package, where) if self.install else "not installed"
        if self._failed[package]:
            raise Absent(self._failed[package])
        return found

    def _get(self, package: str, where: Path) -> str:
        """ "" if it was installed, else why not."""
        kind, _, what = package.partition(" ")
        where.mkdir(parents=True, exist_ok=True)
        if kind == "npm":
            if shutil.which("npm") is None:
                return "npm is not installed"
            commands = [["npm", "i", "--no-audit", "--no-fund", "--prefix", str(where), what]]
        else:
            names = what.partition(": ")[2].split()
            commands = [
                [sys.executable, "-m", "venv", str(where)],
                [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", *names],
            ]
        print(f"installing {package} ...", file=sys.stderr, flush=True)
        try:
            for command in commands:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
                )
                if done.returncode:
                    return f"{command[0]} failed: {' '.join(done.stderr.split())[-200:]}"
        except subprocess.TimeoutExpired:
            return f"{commands[-1][0]} did not end within {INSTALL_TIMEOUT_S} s"
        return ""


def command_of(client: Client, program: Path, scripts: Path, base_url: str) -> list[str]:
    script = scripts / client.script
    url = f"{base_url}/v1" if client.with_v1 else base_url
    if client.program in ("python", "node"):
        return [str(program), str(script), url, *client.arguments]
    return ["bash", str(script), url, *client.arguments]


def environment_of(client: Client, program: Path, modules: Path, key: str, timeout_s: int) -> dict[str, str]:
    return {
        "PATH": os.pathsep.join([str(program.parent), os.defpath, "/usr/local/bin"]),
        "HOME": "/nonexistent",  # the scripts make one of their own
        "CLIENT_API_KEY": key,
        "CLIENT_BIN": str(program),
        "CLIENT_MODULES": str(modules),
        "CLIENT_PROMPT": PROMPT,
        "CLIENT_TIMEOUT": str(timeout_s),
        **client.variables,
    }
