"""Who calls, and for which of its sessions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.clients import CLIENTS, Confidence, Signal, recognise, task_id_of
from gateway.core.errors import InvalidRequest
from gateway.core.identity import TaskSource
from tests.support.agent_runs import facts_of
from tests.support.material import ABSENT, Captured, captured


def uuid(n: int) -> str:
    return f"00000000-0000-4000-8000-{n:012}"


def ses(n: int) -> str:
    return f"ses_{n:026}"


NONE = ("", "new", "", "", "", "none")


def client(session: str, purpose: str = "") -> tuple[str, ...]:
    return (session, "client", "", "", purpose, "high")


#: (external id, source, parent, agent, purpose, confidence) by design/clients.md, section 2
EXPECTED = {
    "claude-code/01-first-turn": client(uuid(1)),
    "claude-code/02-second-turn": client(uuid(1)),
    "claude-code/03-subagent": (
        f"{uuid(2)}/adcef1fd8805f4542",
        "client",
        uuid(2),
        "adcef1fd8805f4542",
        "subagent",
        "high",
    ),
    "claude-code/04-tui-title": client(uuid(3), "title"),
    "claude-code/05-tui-turn": client(uuid(3)),
    "claude-code/06-tui-compact": client(uuid(3)),
    # custom headers: the person's own task wins over the client's session
    "claude-code/07-model-discovery": ("t-42", "header", "", "", "", "high"),
    "claude-code/08-no-attribution": ("t-42", "header", "", "", "", "high"),
    "claude-code/10-stripped-after-400": client(uuid(5)),
    "claude-code/11-output-limit-continue": client(uuid(6)),
    "codex/01-first-turn": client(uuid(1)),
    "codex/02-second-turn": client(uuid(1)),
    "codex/03-resume": ("t-42", "header", "", "", "", "high"),
    "codex/04-compaction": client(uuid(19), "compaction"),
    "codex/05-after-compaction": client(uuid(19)),
    "codex/06-websocket-upgrade": client(uuid(32)),
    "opencode/01-title": client(ses(1), "title"),
    "opencode/02-chat-first-turn": client(ses(1)),
    "opencode/03-chat-second-turn": client(ses(1)),
    "opencode/04-responses-turn": client(ses(2)),
    "opencode/05-messages-turn": client(ses(3)),
    "opencode/06-subagent": ("t-42", "header", "", ses(5), "subagent", "high"),
    "copilot-cli/03-responses-second": ("0bef1ca4f0bcaa30dfbc87b37a0a9d88", "body", "", "", "", "medium"),
    "openai-python/04-responses": ("task-1", "body", "", "", "", "medium"),
    "openai-node/03-responses": ("task-1", "body", "", "", "", "medium"),
}
#: where the User-Agent is only that of a library, the library is what is recognised
LABELS = {
    "aider": {"openai-python"},
    "cline": {"ai-sdk"},
    "copilot-cli": {"copilot"},
    "langchain": {"openai-python", "langchain"},
    "mini-swe-agent": {"openai-python", "litellm"},
}


@pytest.mark.parametrize("request_", captured() or [None], ids=lambda r: r.name if r else ABSENT)
def test_a_captured_request_resolves_to_the_session_that_its_client_means(request_: Captured | None) -> None:
    if request_ is None:
        return
    facts = facts_of(request_)
    hints = facts.session_hints if facts else {}
    headers = {name.lower(): value for name, value in request_.headers}
    signal = recognise(headers, hints, None, facts.tool_count if facts else None)

    folder = request_.name.partition("/")[0]
    if request_.name != "claude-code/09-probe":  # sent by its runtime, without a word about the client
        assert signal.client in LABELS.get(folder, {folder})
    session = (signal.external_id, signal.source, signal.parent_external_id, signal.agent_id)
    assert (*session, signal.purpose, signal.confidence) == EXPECTED.get(request_.name, NONE)


def test_the_table_of_expectations_names_only_requests_that_exist() -> None:
    if names := {r.name for r in captured()}:
        assert EXPECTED.keys() <= names


CLAUDE = {"user-agent": "claude-cli/2.1 (external, cli)", "x-claude-code-session-id": "s1"}


@pytest.mark.parametrize(
    ("headers", "hints", "path", "expected"),
    [
        ({**CLAUDE, "x-task-id": "t", "x-litellm-session-id": "l"}, {}, "p", ("p", TaskSource.PATH)),
        ({**CLAUDE, "x-task-id": " t ", "x-litellm-session-id": "l"}, {}, None, ("t", TaskSource.HEADER)),
        ({**CLAUDE, "x-litellm-session-id": "l"}, {}, None, ("l", TaskSource.HEADER)),
        ({**CLAUDE, "session-id": "c"}, {}, None, ("s1", TaskSource.CLIENT)),
        ({"session-id": "c", "x-session-id": "o"}, {}, None, ("c", TaskSource.CLIENT)),
        ({"x-session-affinity": "o", "x-acme-session-id": "v"}, {}, None, ("o", TaskSource.CLIENT)),
        ({"x-acme-session-id": "v"}, {"session_id": "b"}, None, ("v", TaskSource.HEADER)),
        ({}, {"prompt_cache_key": "k", "conversation": "c"}, None, ("c", TaskSource.BODY)),
        ({}, {"metadata.task_id": "t", "prompt_cache_key": "k"}, None, ("k", TaskSource.BODY)),
        (
            {"x-parent-session-id": "p"},
            {"user": "u", "previous_response_id": "r"},
            None,
            ("", TaskSource.NEW),
        ),
        ({"x-task-id": "  "}, {}, "", ("", TaskSource.NEW)),  # an unset variable is no task
    ],
)
def test_the_first_signal_wins(
    headers: dict[str, str], hints: dict[str, str], path: str | None, expected: tuple[str, TaskSource]
) -> None:
    signal = recognise(headers, hints, path)
    assert (signal.external_id, signal.source) == expected


@pytest.mark.parametrize(
    "header", ["x-litellm-trace-id", "helicone-session-id", "x-portkey-trace-id", "x-opencode-session"]
)
def test_headers_set_for_other_proxies_work_unchanged(header: str) -> None:
    assert recognise({header: "run-7"}, {}, None).external_id == "run-7"


def test_a_traceparent_counts_by_its_trace() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    assert recognise({"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}, {}, None).external_id == trace
    for bad in (f"00-{'0' * 32}-00f067aa0ba902b7-01", trace, "00-xyz-1-01"):
        assert recognise({"traceparent": bad}, {}, None).external_id == "", bad


def test_the_session_inside_anthropics_user_id() -> None:
    def session(user_id: str) -> str:
        return recognise({}, {"user_id": user_id}, None).external_id

    assert session(json.dumps({"device_id": "d", "session_id": "s9"})) == "s9"
    assert session(f"user_{'a' * 64}_account__session_{uuid(4)}") == uuid(4)
    for person in (
        "user-1",
        "{",
        "{}",
        '{"session_id": 7}',
        '{"session_id": "a\\nb"}',
        "{" * 9000,
        "user_1_session_x",
    ):
        assert session(person) == "", person


def test_sub_agents_are_children_of_whoever_started_them() -> None:
    agent = recognise({**CLAUDE, "x-claude-code-agent-id": "a1"}, {}, None)
    nested = recognise(
        {**CLAUDE, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}, {}, None
    )
    assert agent == Signal("claude-code", "s1/a1", TaskSource.CLIENT, "s1", "a1", "subagent", Confidence.HIGH)
    assert (nested.external_id, nested.parent_external_id) == ("s1/a2", agent.external_id)

    codex = {"user-agent": "codex_exec/0.171.0", "session-id": "root"}
    main = recognise({**codex, "thread-id": "root"}, {}, None)
    child = recognise({**codex, "thread-id": "t2"}, {}, None)
    grandchild = recognise({**codex, "thread-id": "t3", "x-codex-parent-thread-id": "t2"}, {}, None)
    assert (main.external_id, main.parent_external_id, main.purpose) == ("root", "", "")
    assert (child.external_id, child.parent_external_id, child.purpose) == ("t2", "root", "subagent")
    assert (grandchild.external_id, grandchild.parent_external_id) == ("t3", "t2")

    opencode = recognise({"x-session-id": "o2", "x-parent-session-id": "o1"}, {}, None)
    assert (opencode.external_id, opencode.parent_external_id, opencode.agent_id) == ("o2", "o1", "o2")


def test_a_parent_may_be_named_for_any_task_but_itself() -> None:
    assert recognise({"x-task-id": "c", "x-parent-task-id": "p"}, {}, None).parent_external_id == "p"
    assert recognise({"x-parent-task-id": "p"}, {}, None).parent_external_id == "p"
    with pytest.raises(InvalidRequest, match="own parent") as caught:
        recognise({"x-task-id": "t", "x-parent-task-id": "t"}, {}, None)
    assert caught.value.param == "x-parent-task-id"
    assert recognise({**CLAUDE, "x-parent-task-id": "s1"}, {}, None).parent_external_id == ""


@pytest.mark.parametrize("bad", ["a\nb", "a\x00b", "a\x7fb", "\u2028", "\udcff", "x" * 257])
def test_malformed_ids_are_refused_in_our_headers_and_passed_over_in_a_clients(bad: str) -> None:
    for header in ("x-task-id", "x-parent-task-id"):
        # "a" keeps a lone separator from being trimmed to nothing
        with pytest.raises(InvalidRequest, match=header) as caught:
            recognise({header: f"a{bad}a"}, {}, None)
        assert caught.value.param == header
    with pytest.raises(InvalidRequest, match="task in the path"):
        recognise({}, {}, f"a{bad}a")
    for header in (
        "x-claude-code-session-id",
        "session-id",
        "x-session-id",
        "helicone-session-id",
        "x-a-session-id",
    ):
        assert recognise({header: f"a{bad}a"}, {"session_id": f"a{bad}a"}, None).external_id == "", header


def test_an_agent_id_that_would_make_the_whole_too_long_is_left_out() -> None:
    signal = recognise({"x-claude-code-session-id": "s" * 200, "x-claude-code-agent-id": "a" * 200}, {}, None)
    assert (signal.external_id, signal.parent_external_id, signal.agent_id) == ("s" * 200, "", "")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"user-agent": "OpenAI/JS 6.26", "session_id": "s"}, "pi"),
        ({"user-agent": "Anthropic/JS 0.94.0", "x-initiator": "agent"}, "copilot"),
        ({"user-agent": "OpenAI/Python 2.1", "x-title": "OpenHands"}, "openhands"),
        ({"user-agent": "litellm/1.110.2", "x-title": "OpenHands"}, "openhands"),
        ({"user-agent": "ai-sdk/openai-compatible/3.0", "x-title": "Cline"}, "cline"),
        ({"user-agent": "claude-cli/2.1", "x-title": "Cline"}, "claude-code"),
        ({"user-agent": "ls/JS 5.23.2"}, "continue"),
        ({"user-agent": "QwenCode/0.15.10 (linux; x64)"}, "qwen-code"),
        ({"user-agent": "curl/8.0", "x-title": "My own <label>"}, "other"),
        ({}, "other"),
    ],
)
def test_clients_by_what_they_say_of_themselves(headers: dict[str, str], expected: str) -> None:
    assert recognise(headers, {}, None).client == expected
    assert expected in CLIENTS


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "user-agent",
                "x-title",
                "session-id",
                "traceparent",
                "anthropic-beta",
                "x-codex-turn-metadata",
                "x-q-session-id",
            ]
        ),
        st.text(),
    ),
    st.text(),
)
def test_nothing_that_a_client_sends_raises_or_widens_a_label(headers: dict[str, str], user_id: str) -> None:
    signal = recognise(headers, {"user_id": user_id, "prompt_cache_key": user_id}, None)
    assert signal.client in CLIENTS
    assert len(signal.external_id) <= 256
    assert signal.external_id.isprintable()


def test_a_task_id_is_the_same_everywhere_and_its_own_under_each_key() -> None:
    assert task_id_of("k1", "run") == "task_" + "73f7d06095dff0ae7e37535763f41c2f"
    assert task_id_of("k1", "run") != task_id_of("k2", "run")
    assert task_id_of("k1", "run") != task_id_of("k1r", "un")
