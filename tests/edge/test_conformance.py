"""What leaves is what came in, byte by byte, apart from the declared splices."""

from __future__ import annotations

import json
import re

import pytest

from gateway.core.catalog import Operation, Wire
from tests.support.material import ABSENT, Captured, captured
from tests.support.recorder import Recorder
from tests.support.small_world import SmallWorld, deployment, provider

PATHS = {"/v1" + op.path: op for op in Operation}
OWN = Captured(ABSENT, "POST", "/v1/chat/completions", [], {"messages": [{"role": "user", "content": "x"}]})
FIXTURES = [c for c in captured() if c.method == "POST" and c.path in PATHS] or [OWN]

#: Bodies that a re-encoder would change. `@` stands for the model's name and is all that may differ.
ODD = {
    "unicode escapes": b'{"model":"@","messages":[{"role":"user","content":"caf\\u00e9 \\ud83d\\ude00 \\/ \\u0041"}]}',
    "raw unicode": '{"model":"@","messages":[{"role":"user","content":"café 😀 \u2028"}]}'.encode(),
    "key order": b'{"zeta":1,"messages":[{"content":"x","role":"user"}],"alpha":{"b":1,"a":2},"model":"@"}',
    "number spellings": b'{"model":"@","temperature":1.0,"top_p":1E-1,"seed":10,"x":[1.10,1e2,-0,0.0],"messages":[{"role":"user","content":"x"}]}',
    "whitespace": b' {\r\n\t"model" :\t"@" ,\n "messages" : [ { "role" : "user" , "content" : "x" } ]\n}\n',
    "unknown nested fields": b'{"model":"@","messages":[{"role":"user","content":"x","new":{"model":"inner","deep":[{"a":null}]}}],"vendor_ext":{"model":"other","stream":true}}',
    "model named inside": b'{"messages":[{"role":"user","content":"{\\"model\\":\\"no\\"}"}],"metadata":{"model":"no"},"model":"@"}',
    "empty containers": b'{"model":"@","messages":[{"role":"user","content":[]}],"tools":[],"stop":[],"logit_bias":{}}',
}


def served(upstream: Recorder) -> list:  # type: ignore[type-arg]
    """One deployment that takes every dialect, told another model name than the client uses."""
    return [deployment(provider(upstream.base_url, Wire.DEMO), model="m", upstream_model="m-2026-11-30")]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_odd_bodies_arrive_as_sent(name: str, path: str) -> None:
    async with Recorder() as upstream, SmallWorld(served(upstream)) as gw:
        sent = ODD[name].replace(b"@", b"m")
        async with gw.http.post(path, data=sent, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 200, await answer.text()
        assert upstream.received[0].body == ODD[name].replace(b"@", b"m-2026-11-30")
        assert upstream.received[0].path == path


@pytest.mark.parametrize("fixture", FIXTURES, ids=[c.name for c in FIXTURES])
@pytest.mark.parametrize("ascii_only", [True, False], ids=["escaped", "utf8"])
async def test_requests_of_real_clients_arrive_as_sent(fixture: Captured, ascii_only: bool) -> None:
    body = dict(fixture.body or {})
    body["model"] = "m"
    sent = json.dumps(body, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    headers = {
        k: v
        for k, v in fixture.headers
        if k.lower() not in ("host", "authorization", "x-api-key", "accept-encoding")
    }
    async with Recorder() as upstream, SmallWorld(served(upstream)) as gw:
        async with gw.http.post(fixture.path, data=sent, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        got = upstream.received[0].body
    expected = sent.replace(b'"model":"m"', b'"model":"m-2026-11-30"', 1)
    if PATHS[fixture.path] is Operation.CHAT and body.get("stream") and not _asks_usage(body):
        # the other declared splice: usage of a stream is asked for, at the end of the object or in its place
        assert json.loads(got)["stream_options"] == {"include_usage": True}
        got = re.sub(rb',?"stream_options":\{"include_usage":true\}', b"", got, count=1)
        expected = re.sub(rb',?"stream_options":\{"include_usage":(?:false|null)\}', b"", expected, count=1)
    assert got == expected


def _asks_usage(body: dict[str, object]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


async def test_only_allowed_headers_leave_and_the_credential_is_ours() -> None:
    async with Recorder() as upstream, SmallWorld(served(upstream)) as gw:
        headers = {
            "anthropic-beta": "one,two",
            "anthropic-version": "2026-10-21",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "Cookie": "session=secret",
            "X-Forwarded-For": "10.0.0.1",
            "x-task-id": "t",
        }
        body = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}'
        async with gw.http.post("/v1/messages?beta=true", data=body, headers=headers) as answer:
            assert answer.status == 200
        got = upstream.received[0]
    assert got.query == "beta=true"
    names = set(got.headers) - {"host", "content-length", "content-type", "user-agent", "accept-encoding"}
    assert names == {
        "anthropic-beta",
        "anthropic-version",
        "traceparent",
        "authorization",
        "x-client-request-id",
    }
    assert got.headers["authorization"] == "Bearer sk-upstream"
    assert got.headers["anthropic-version"] == "2026-10-21"
