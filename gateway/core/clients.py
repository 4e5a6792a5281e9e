"""Which client is calling, and which of its sessions: what turns an agent's run into a task without code changes.

The order of signals and what each client sends were measured against 19 clients on 2026-11-30 (Claude Code
2.1.332, Codex 0.171.0, opencode 1.18.33, pi 0.73.1, Copilot CLI 1.0.102, OpenHands SDK 1.58.2, ...); the first
signal that is well-formed wins:
  1. the gateway's own: a task in the URL path, then `x-task-id` (with `x-parent-task-id`)
  2. headers that people already set for other proxies (LiteLLM, Helicone, Portkey, opencode), W3C traceparent
  3. Claude Code's session header, then the session inside `metadata.user_id`
  4. Codex's session and thread, pi's session, opencode's session and its parent
  5. any `x-<vendor>-session-id`
  6. ids in the body: of medium confidence, because a `prompt_cache_key` may be shared by many sessions
What names no session here may still be recognised by `prefix`: that needs state. A task-scoped key is decided
before any of this. `user` and `safety_identifier` name a person, never a session.

All ids are the client's word: they are namespaced by key (`task_id_of`), capped and free of control characters.
A malformed signal of a client is passed over; only the gateway's own headers are refused when malformed. Nothing
in here may be logged except a `Signal`: the raw `metadata.user_id` and Codex's turn metadata hold device ids and
workspace paths.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.identity import TaskSource

MAX_ID_CHARS = 256
#: Longer metadata is not parsed; Codex sends about 1 KB.
_MAX_METADATA_CHARS = 8_192


class Confidence(StrEnum):
    """How surely a signal names one session."""

    HIGH = "high"
    MEDIUM = "medium"
    NONE = "none"  # no signal


class Signal(msgspec.Struct, frozen=True):
    """What a request says about where it comes from.

    `client` is one of `CLIENTS`. `external_id` is "" when nothing names a session (then `source` is NEW and
    lineage decides). `parent_external_id` names the task that this one is a child of, "" if it has none that is
    known. `agent_id` is the sub-agent's own id, "" for the main one. `purpose` is "", "title", "compaction" or
    "subagent".
    """

    client: str
    external_id: str
    source: TaskSource
    parent_external_id: str
    agent_id: str
    purpose: str
    confidence: Confidence


#: User-Agent prefix, lower case -> label; the first match wins.
_USER_AGENTS = (
    ("claude-cli/", "claude-code"),
    ("claude-code/", "claude-code"),
    ("codex", "codex"),  # codex_exec/, codex_cli_rs/, codex-tui/
    ("opencode/", "opencode"),
    ("qwencode/", "qwen-code"),
    ("geminicli", "gemini-cli"),
    ("ls/js", "continue"),
    ("githubcopilot", "copilot"),
    ("agents/python", "openai-agents"),
    ("pydantic-ai/", "pydantic-ai"),
    ("langchain", "langchain"),
    ("litellm/", "litellm"),
    ("ai-sdk/", "ai-sdk"),  # Cline too: only its tools tell it from other users of that SDK
    ("openai/python", "openai-python"),
    ("asyncopenai/python", "openai-python"),
    ("openai/js", "openai-node"),
    ("anthropic/python", "anthropic-python"),
    ("asyncanthropic/python", "anthropic-python"),
    ("anthropic/js", "anthropic-node"),
)
#: `X-Title`, lower case -> label: agents whose User-Agent is only that of an SDK.
_TITLES = {
    "openhands": "openhands",
    "cline": "cline",
    "roo code": "roo-code",
    "kilo code": "kilo-code",
    "aider": "aider",
}
#: All labels that `Signal.client` can have: safe as a metric's label.
CLIENTS = frozenset({*(label for _, label in _USER_AGENTS), *_TITLES.values(), "pi", "other"})
#: All values of `Signal.purpose`.
PURPOSES = frozenset({"", "title", "compaction", "subagent"})

#: Labels of libraries: an agent on top of one may still say who it is.
_LIBRARIES = frozenset(
    {"litellm", "ai-sdk", "openai-python", "openai-node", "anthropic-python", "anthropic-node", "other"}
)


def is_library(client: str) -> bool:
    """Whether agents that do not say who they are may hide behind that label."""
    return client in _LIBRARIES


def signatures(client: str) -> tuple[str, ...]:
    """What the label is known by, for people; () for one that is not known."""
    found = [f"User-Agent: {prefix}..." for prefix, label in _USER_AGENTS if label == client]
    found += [f"X-Title: {title}" for title, label in _TITLES.items() if label == client]
    more = {
        "pi": "User-Agent of openai-node, with a session_id header",
        "copilot": "X-Initiator, with the User-Agent of a library",
        "other": "anything else",
    }
    return (*found, *([more[client]] if client in more else []))


#: mini-swe-agent's only tool, which is near the end of what LiteLLM sends (2.4.6 on LiteLLM 1.110.2, 2026-12-01).
_MINI_TOOL = re.compile(rb'"description": ?"Execute a bash command"')
_TAIL_BYTES = 4_096


def on_litellm(headers: Mapping[str, str]) -> bool:
    """Whether LiteLLM may be the one who sends this, by itself or through OpenAI's SDK."""
    client = label(headers)
    return client == "litellm" or (client == "openai-python" and "x-stainless-raw-response" in headers)


def ends_only_at_not_found(headers: Mapping[str, str], body: bytes) -> bool:
    """Whether this is mini-swe-agent, which repeats up to ten times what is refused otherwise.

    Its loop gives up at LiteLLM's errors for 401, 404, a prompt that is too long, and (messages only) 403; of these the
    404 alone is shown without advice that would mislead. It does not say who it is, so it is known by its tool.
    """
    return on_litellm(headers) and _MINI_TOOL.search(body, max(0, len(body) - _TAIL_BYTES)) is not None


#: In this order. The trace id inside a traceparent is an alias like the others, never an identity.
_ALIASES = (
    "x-litellm-trace-id",
    "x-litellm-session-id",
    "helicone-session-id",
    "x-portkey-trace-id",
    "traceparent",
    "x-opencode-session",
)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_VENDOR_SESSION = re.compile(r"x-(?!parent-)[a-z0-9][a-z0-9-]*-session-id")
_TASK_ID = re.compile(r"task_[0-9a-f]{32}")
_LEGACY_USER_ID = re.compile(r"user_.*_session_([0-9a-fA-F-]{36})")
_BODY_HINTS = ("session_id", "conversation", "prompt_cache_key", "metadata.session_id", "metadata.task_id")


@dataclass(frozen=True, slots=True)
class _Session:
    """A session as one signal names it."""

    external_id: str
    source: TaskSource
    parent: str = ""
    agent: str = ""
    confidence: Confidence = Confidence.HIGH


def recognise(
    headers: Mapping[str, str], hints: Mapping[str, str], path_task: str | None, tool_count: int | None = None
) -> Signal:
    """Read the signals of one request.

    `headers` has lower-case names. `hints` are strings of the body, where present: user_id (Anthropic's
    metadata.user_id), session_id, conversation, prompt_cache_key, metadata.session_id, metadata.task_id;
    others are ignored (previous_response_id needs a look-up). `path_task` is <task> of /t/<task>/v1/...;
    `tool_count`, if known, tells title calls from turns.

    Raises `InvalidRequest` if the path's task, `x-task-id` or `x-parent-task-id` is malformed.
    """
    client = label(headers)
    if path_task is None and _HINTS.isdisjoint(hints) and _says_nothing(headers):
        return Signal(
            client, "", TaskSource.NEW, "", "", _purpose(client, headers, "", tool_count), Confidence.NONE
        )
    native = _claude_code(headers, hints) or _codex_or_pi(headers) or _opencode(headers)
    agent = native.agent if native else ""
    session = (
        _own(headers, path_task)
        or _alias(headers)
        or native
        or _vendor_session(headers)
        or _body(hints)
        or _Session("", TaskSource.NEW, confidence=Confidence.NONE)
    )
    parent = _own_id(headers.get("x-parent-task-id"), "x-parent-task-id") or session.parent
    if parent and parent == session.external_id:
        if session.source in (TaskSource.PATH, TaskSource.HEADER):
            raise InvalidRequest("A task cannot be its own parent.", param="x-parent-task-id")
        parent = session.parent
    return Signal(
        client,
        session.external_id,
        session.source,
        parent,
        agent,
        _purpose(client, headers, agent, tool_count),
        session.confidence,
    )


def task_id_of(key_id: str, external_id: str) -> str:
    """The task that a client's id names under a key: the same on every replica, without a look-up.

    One client's ids can neither reach another key's tasks nor be guessed from a task's id.
    """
    digest = hashlib.blake2b(f"{key_id}\0{external_id}".encode(), digest_size=16)
    return f"task_{digest.hexdigest()}"


def is_task_id(name: str) -> bool:
    """Whether it has the form of the gateway's own ids of tasks."""
    return name.startswith("task_") and _TASK_ID.fullmatch(name) is not None


#: All headers that any rule below looks at for a session, but for vendors' x-...-session-id.
_HEADERS = frozenset(
    {
        "x-task-id",
        "x-parent-task-id",
        "x-claude-code-session-id",
        "session-id",
        "session_id",
        "thread-id",
        "x-session-id",
        "x-session-affinity",
        *_ALIASES,
    }
)
_HINTS = frozenset({"user_id", *_BODY_HINTS})


def _says_nothing(headers: Mapping[str, str]) -> bool:
    """True if no header can name a session: most SDK calls, which then need none of the rules."""
    names = "\n".join(headers).lower()
    return "-session-id" not in names and _HEADERS.isdisjoint(names.split("\n"))


# --- the signals, in their order ---------------------------------------------------------------------


def _own(headers: Mapping[str, str], path_task: str | None) -> _Session | None:
    if task := _own_id(path_task, "path"):
        return _Session(task, TaskSource.PATH)
    if task := _own_id(headers.get("x-task-id"), "x-task-id"):
        return _Session(task, TaskSource.HEADER)
    return None


def _alias(headers: Mapping[str, str]) -> _Session | None:
    for name in _ALIASES:
        value = _id(headers.get(name))
        if name == "traceparent" and value:
            trace = _TRACEPARENT.fullmatch(value)
            value = trace[1] if trace else ""
        if value:
            return _Session(value, TaskSource.HEADER)
    return None


def _claude_code(headers: Mapping[str, str], hints: Mapping[str, str]) -> _Session | None:
    """A sub-agent becomes "<session>/<agent>", a child of the session or of the agent that started it."""
    session = _id(headers.get("x-claude-code-session-id")) or _session_of_user_id(hints.get("user_id", ""))
    if not session:
        return None
    agent = _id(headers.get("x-claude-code-agent-id"))
    # together they must still be an id
    own = _id(f"{session}/{agent}") if agent else ""
    if not own:
        return _Session(session, TaskSource.CLIENT)
    starter = _id(headers.get("x-claude-code-parent-agent-id"))
    parent = _id(f"{session}/{starter}") if starter and starter != agent else ""
    return _Session(own, TaskSource.CLIENT, parent or session, agent)


def _codex_or_pi(headers: Mapping[str, str]) -> _Session | None:
    """A Codex sub-agent shares its session's id and has a thread of its own; the main thread is the session."""
    session = _id(headers.get("session-id")) or _id(headers.get("session_id"))
    thread = _id(headers.get("thread-id")) or session
    if not thread:
        return None
    starter = _id(headers.get("x-codex-parent-thread-id")) or session
    if not starter or starter == thread:
        return _Session(thread, TaskSource.CLIENT)
    return _Session(thread, TaskSource.CLIENT, starter, thread)


def _opencode(headers: Mapping[str, str]) -> _Session | None:
    session = _id(headers.get("x-session-id")) or _id(headers.get("x-session-affinity"))
    if not session:
        return None
    starter = _id(headers.get("x-parent-session-id"))
    if not starter or starter == session:
        return _Session(session, TaskSource.CLIENT)
    return _Session(session, TaskSource.CLIENT, starter, session)


def _vendor_session(headers: Mapping[str, str]) -> _Session | None:
    # sorted, so that the order of two such headers on the wire does not matter
    for name in sorted(low for n in headers if _VENDOR_SESSION.fullmatch(low := n.lower())):
        if session := _id(headers[name]):
            return _Session(session, TaskSource.HEADER)
    return None


def _body(hints: Mapping[str, str]) -> _Session | None:
    for name in _BODY_HINTS:
        if session := _id(hints.get(name)):
            return _Session(session, TaskSource.BODY, confidence=Confidence.MEDIUM)
    return None


# --- parts -------------------------------------------------------------------------------------------


class _UserId(msgspec.Struct):
    session_id: str = ""


class _TurnMetadata(msgspec.Struct):
    request_kind: str = ""


def _session_of_user_id(user_id: str) -> str:
    """Claude Code's metadata.user_id: a JSON object, in older versions user_<hash>_account_<id>_session_<uuid>."""
    if len(user_id) > _MAX_METADATA_CHARS:
        return ""
    if user_id.startswith("{"):
        try:
            return _id(msgspec.json.decode(user_id, type=_UserId).session_id)
        except msgspec.DecodeError:
            return ""
    legacy = _LEGACY_USER_ID.fullmatch(user_id)
    return legacy[1] if legacy else ""


@functools.lru_cache(maxsize=1_024)
def _label_of(user_agent: str) -> str:
    agent = user_agent.lower()
    return next((label for prefix, label in _USER_AGENTS if agent.startswith(prefix)), "other")


def label(headers: Mapping[str, str]) -> str:
    """Which client is calling, by its headers: one of `CLIENTS`."""
    named = _label_of(headers.get("user-agent", ""))
    if named not in _LIBRARIES:
        return named
    title = _TITLES.get(headers.get("x-title", "").strip().lower())
    if title:
        return title
    if "x-initiator" in headers:
        return "copilot"
    return "pi" if named == "openai-node" and "session_id" in headers else named


def _purpose(client: str, headers: Mapping[str, str], agent: str, tool_count: int | None) -> str:
    subagent = headers.get("x-openai-subagent", "")
    if subagent == "compact" or _is_codex_compaction(headers.get("x-codex-turn-metadata", "")):
        return "compaction"
    # Claude Code asks for the title's JSON by this beta and sends no tools; opencode only sends no tools
    structured = "structured-outputs-" in headers.get("anthropic-beta", "")
    if client == "claude-code" and not agent and structured and not tool_count:
        return "title"
    if client == "opencode" and tool_count == 0:
        return "title"
    return "subagent" if agent or subagent else ""


def _is_codex_compaction(metadata: str) -> bool:
    if not metadata or len(metadata) > _MAX_METADATA_CHARS:
        return False
    try:
        return msgspec.json.decode(metadata, type=_TurnMetadata).request_kind == "compaction"
    except msgspec.DecodeError:
        return False


def _id(value: str | None) -> str:
    """The trimmed id, or "" if it is absent, too long or holds control characters (or undecodable bytes)."""
    value = value.strip() if value else ""
    return value if len(value) <= MAX_ID_CHARS and value.isprintable() else ""


def _own_id(value: str | None, name: str) -> str:
    """Like `_id`, but refuses what is present and malformed; blank counts as absent (an unset variable)."""
    if not value or not value.strip():
        return ""
    accepted = _id(value)
    if not accepted:
        what = "The task in the path" if name == "path" else name
        raise InvalidRequest(
            f"{what} must have at most {MAX_ID_CHARS} characters and no control characters.", param=name
        )
    return accepted
