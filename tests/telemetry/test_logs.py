"""Canaries: a secret put into every place of a log line never comes out."""

from __future__ import annotations

import io
import json
import logging
import random
import string
from collections.abc import Iterator

import pytest

from gateway.telemetry.logs import AccessLog, JsonFormatter, configure
from gateway.telemetry.redact import redact, redact_field

OURS = "gw-abcd1234-" + "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MA"
CANARIES = {
    "ours": OURS,
    "openai": "sk-proj-" + "canary0canary1canary2",
    "anthropic": "sk-ant-api03-" + "canary3canary4",
    "google": "AIza" + "SyCanary5Canary6Canary7",
    "xai": "xai-" + "canary8canary9",
    "groq": "gsk_" + "canaryacanaryb",
    "aws": "AKIA" + "CANARYCCANARYD",
    "aws secret": "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYzz9Qk2Vt8p",
    "github": "ghp_" + "canaryecanaryf012345",
    "web token": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiJjYW5hcnkifQ.c2lnbmF0dXJl",
    "hex": "00112233445566778899" + "aabbccddeeff",
    "unknown kind": "Q7hT2pX9vL4mN8cR1zK6" + "wB3yJ5dF0sGaE",
}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """`logging` sent to a buffer, and put back afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()
    configure("debug", out)
    yield out
    logging.captureWarnings(False)
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_is_one_json_object_with_its_extras(log: io.StringIO) -> None:
    logging.getLogger("gateway.app").warning(
        "slow %s", "store", extra={"request_id": "req_" + "0" * 32, "n": 3}
    )

    (line,) = log.getvalue().splitlines()
    got = json.loads(line)
    assert got.pop("time").endswith("Z")
    assert got == {
        "level": "warning",
        "logger": "gateway.app",
        "message": "slow store",
        "request_id": "req_" + "0" * 32,
        "n": 3,
    }


@pytest.mark.parametrize("secret", CANARIES.values(), ids=CANARIES)
def test_no_secret_leaves_through_any_part_of_a_line(log: io.StringIO, secret: str) -> None:
    logger = logging.getLogger("gateway.canary")
    logger.info("in the message: " + secret)
    logger.info("in an argument: %s", secret)
    logger.info("in a mapping argument: %(key)s", {"key": secret})
    logger.info("in a repr: %r", {"headers": [("X-Odd", secret)]})
    logger.info("as bytes: %s", secret.encode())
    logger.info("extras", extra={"upstream": secret, "nested": {"list": [secret, (b"odd", secret.encode())]}})
    logger.info("extra's name", extra={secret: 1})
    logger.info("quoted in json: %s", json.dumps({"detail": {"key": secret}}))
    logger.info(f"https://host/path?key={secret}&x=1")
    logger.info(f"prefix {secret}.")
    try:
        try:
            raise KeyError(secret)
        except KeyError as cause:
            raise RuntimeError(f"refused: Incorrect API key provided: {secret}") from cause
    except RuntimeError:
        logger.exception("with its traceback")
    logger.info("stack", stack_info=True)
    logging.getLogger(f"named.{secret}").info("as a logger's name")

    text = log.getvalue()
    assert secret not in text
    assert secret[8:] not in text
    assert len(text.splitlines()) == 13, "every line is there, each on one line"
    assert all(json.loads(line) for line in text.splitlines())


@pytest.mark.parametrize(
    "name", ["Authorization", "x-api-key", "Cookie", "Set-Cookie", "X-Goog-Api-Key", "api_key"]
)
def test_a_field_that_says_secret_is_one_whatever_it_looks_like(name: str) -> None:
    assert redact_field("headers", {name: "hunter2"}) == {name: "[redacted]"}
    assert redact_field("headers", [(name, "hunter2"), (name.encode(), b"hunter2")]) == [
        [name, "[redacted]"],
        [name, "[redacted]"],
    ]
    assert redact_field(name, 12345) == "[redacted]"
    for text in (
        f"{name}: Basic hunter2; other=hunter2",
        f"{{'{name}': 'hunter2'}}",
        json.dumps({name: "hunter2"}),
        json.dumps(json.dumps({name: "hunter2"})),
        f"({name.encode()!r}, b'hunter2')",
        f"{name}=hunter2",
    ):
        assert "hunter2" not in redact(text), text


def test_arguments_that_do_not_fit_are_kept_and_redacted() -> None:
    record = logging.makeLogRecord({"msg": "one too many", "args": (OURS,), "name": "gateway"})
    assert json.loads(JsonFormatter().format(record))["message"] == "one too many ('[redacted]',)"


@pytest.mark.parametrize(
    "text",
    [
        "claude-sonnet-4-5-20250929-thinking",
        "anthropic.claude-3-5-haiku-20241022-v1:0",
        "meta-llama/Llama-3.3-70B-Instruct-Turbo-FP8",
        "/work/.venv/lib/python3.11/site-packages/aiohttp/client_reqrep.py",
        "req_0123456789abcdef0123456789abcdef",
        "GET /admin/v1/requests/req_0123456789abcdef0123456789abcdef",
        "550e8400-e29b-41d4-a716-446655440000",
        "StreamingResponseBodyTimeoutErrorFromUpstream2",
        "tollhouse_request_duration_seconds_bucket",
        "2026-12-01T12:00:00.000Z",
        "the basic idea, bearer of news: 12 tokens",
    ],
)
def test_what_an_operator_needs_stays_readable(text: str) -> None:
    assert redact(text) == text


def test_passwords_in_urls_go_and_the_rest_stays() -> None:
    assert redact("postgresql://gw:hunter2@db:5432/tollhouse") == "postgresql://[redacted]@db:5432/tollhouse"


def test_trace_ids_pass_only_in_their_own_field() -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    assert redact_field("trace_id", trace_id) == trace_id
    assert redact_field("note", trace_id) == "[redacted]"
    assert redact_field("trace_id", CANARIES["unknown kind"]) == "[redacted]"


def test_random_keys_without_any_known_mark_are_caught() -> None:
    letters = random.Random(20261201)
    alphabet = string.ascii_letters + string.digits + "-_"
    keys = ["".join(letters.choices(alphabet, k=43)) for _ in range(500)]
    assert [k for k in keys if redact(f"key {k}!") != "key [redacted]!"] == []


def test_the_access_log_writes_queued_lines_and_redacts_them() -> None:
    out = io.StringIO()
    log = AccessLog(out, wall_clock=lambda: 1_800_000_000.5)
    log.start()
    log.write(
        {"method": "POST", "status": 200, "model": OURS, "task_id": "task_" + "0" * 32, "cost_usd": "0.03765"}
    )
    log.close()

    assert json.loads(out.getvalue()) == {
        "time": "2027-01-15T08:00:00.500Z",
        "log": "access",
        "method": "POST",
        "status": 200,
        "model": "[redacted]",
        "task_id": "task_" + "0" * 32,
        "cost_usd": "0.03765",
    }


def test_a_full_access_log_drops_and_counts() -> None:
    out = io.StringIO()
    log = AccessLog(out, capacity=3)
    for n in range(10):
        log.write({"n": n})
    log.close()

    assert [json.loads(line)["n"] for line in out.getvalue().splitlines()] == [0, 1, 2]
    assert log.dropped == 7


def test_a_stream_that_breaks_is_counted_not_raised(log: io.StringIO) -> None:
    closed = io.StringIO()
    closed.close()
    access = AccessLog(closed)
    access.write({"n": 1})
    access.close()
    assert access.failed == 1

    log.close()
    logging.getLogger("gateway").error("nobody reads this")
