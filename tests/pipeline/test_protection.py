"""What a vLLM of one's own is told in a client's name: a salt that keeps tenants apart and a priority, never the client's."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.catalog import Tier
from gateway.core.rules import Caps, RuleText
from gateway.core.secrets import hmac_of
from gateway.core.serving import CacheSalt, Serving, Urgency
from gateway.core.shaping import CachingPolicy, Level
from tests.support.played_cache import RULES, compact
from tests.support.recorder import Recorder
from tests.support.small_world import KEY_ID, PEPPER, SmallWorld, deployment, key_record, provider

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID = [{"role": "user", "content": "hi"}]


def salt_of(text: str) -> str:
    return base64.urlsafe_b64encode(hmac_of(PEPPER, f"cache_salt:{text}")[:18]).decode()


@asynccontextmanager
async def world(
    serving: Serving = Serving(),  # noqa: B008 - frozen
    *,
    cache_rules: str = "vllm",
    level: Level = Level.SAFE,
    rules: Sequence[RuleText] = (),
    **key: object,
) -> AsyncIterator[tuple[SmallWorld, Recorder]]:
    async with Recorder() as upstream:
        there = deployment(provider(upstream.base_url, cache_rules=cache_rules), "m", "m", serving=serving)
        async with SmallWorld(
            [there],
            cache_rules=RULES,
            caching=CachingPolicy(level=level),
            rules=rules,
            record=key_record(**key),
        ) as gw:
            yield gw, upstream


async def arrived(
    gw: SmallWorld, upstream: Recorder, path: str = CHAT, body: bytes = b"", **headers: str
) -> tuple[bytes, str | None]:
    """(what the server got, the changes that the answer names)."""
    body = body or compact({"model": "m", "messages": SAID})
    told = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    async with gw.http.post(path, data=body, headers=told) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return upstream.received[-1].body, answer.headers.get("x-cache-transforms")


# --- salts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [*Level])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_tenant_has_one_salt_at_every_level_that_nobody_else_can_guess(
    level: Level, path: str
) -> None:
    said = {"messages": SAID} if path == CHAT else {"input": "hi"}
    async with world(level=level) as (gw, upstream):
        for tenant in ("t1", "t2", "t1"):
            gw.world.keys.records[KEY_ID] = replace(gw.record, tenant_id=tenant)  # type: ignore[attr-defined]
            body, named = await arrived(gw, upstream, path, compact({"model": "m", **said}))
            assert json.loads(body) == {"model": "m", **said, "cache_salt": salt_of(tenant)}
            assert named == "cache_salt@1"
    assert len({salt_of("t1"), salt_of("t2")}) == 2
    assert len(salt_of("t1")) == 24  # 144 bits of an HMAC under the pepper


@pytest.mark.parametrize(
    ("apart", "rules", "salt"),
    [
        (None, "vllm", salt_of("t1")),
        (None, "nobody", None),
        (CacheSalt.TENANT, "nobody", salt_of("t1")),
        (CacheSalt.TEAM, "vllm", salt_of("t1/team:team1")),
        (CacheSalt.NONE, "vllm", None),
    ],
)
async def test_who_shares_is_said_by_deployment(
    apart: CacheSalt | None, rules: str, salt: str | None
) -> None:
    async with world(Serving(cache_salt=apart), cache_rules=rules) as (gw, upstream):
        body, _ = await arrived(gw, upstream)
        assert json.loads(body).get("cache_salt") == salt


@pytest.mark.parametrize("name", ["cache_salt", "cache\\u005fsalt"])
async def test_a_client_s_own_salt_is_replaced_and_every_other_byte_stays(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{ "model":"m", "%b" : "of another tenant" ,"messages":%b}' % (name.encode(), compact(SAID))
    with caplog.at_level(logging.WARNING, "gateway.pipeline.shape"):
        async with world() as (gw, upstream):
            for _ in range(3):
                sent, named = await arrived(gw, upstream, body=body)
                assert sent == body.replace(b'"of another tenant"', b'"%b"' % salt_of("t1").encode())
                assert named == "cache_salt@1"
        async with world(Serving(cache_salt=CacheSalt.NONE)) as (gw, upstream):
            sent, _ = await arrived(gw, upstream, body=body)
            assert sent == body.replace(b'"of another tenant"', b"null")
    told = [record.getMessage() for record in caplog.records]
    assert (
        told
        == [  # once by each of the two gateways
            f"key {KEY_ID} sends 'cache_salt' of its own; up/m gets the gateway's instead, now and from now on"
        ]
        * 2
    )


async def test_what_a_client_says_to_somebody_else_s_server_is_between_the_two() -> None:
    body = compact({"model": "m", "messages": SAID, "cache_salt": "mine", "priority": 3})
    async with world(cache_rules="nobody") as (gw, upstream):
        assert await arrived(gw, upstream, body=body) == (body, None)


# --- priorities -------------------------------------------------------------------------------------------

TAKES = Serving(takes_priority=True, cache_salt=CacheSalt.NONE)


@pytest.mark.parametrize(
    ("labels", "key_labels", "priority"),
    [
        ("", {}, None),  # 0 is what requests without one have
        ("workload=interactive", {}, None),
        ("workload=batch", {}, 10),
        ("env=ci, workload=offline", {}, 10),
        ("", {"workload": "batch"}, 10),
        ("workload=interactive", {"workload": "batch"}, 10),  # what is said of a key, no request takes back
        ("workload=sometimes", {}, None),
    ],
)
async def test_interactive_comes_before_batch(
    labels: str, key_labels: dict[str, str], priority: int | None
) -> None:
    async with world(TAKES, labels=key_labels) as (gw, upstream):
        body, named = await arrived(gw, upstream, x_labels=labels)
        assert json.loads(body).get("priority") == priority
        assert named == (None if priority is None else "priority@1")
    async with world(labels=key_labels) as (gw, upstream):  # a server that has not said that it takes one
        body, _ = await arrived(gw, upstream, x_labels=labels)
        assert "priority" not in json.loads(body)


@pytest.mark.parametrize("serving", [TAKES, Serving()])
async def test_a_client_s_own_priority_goes_nowhere(serving: Serving) -> None:
    body = b'{"priority":-1000,"model":"m","messages":%b}' % compact(SAID)
    async with world(serving) as (gw, upstream):
        sent, named = await arrived(
            gw, upstream, body=body, x_vllm_priority="-1000", x_data_parallel_rank="1"
        )
        assert json.loads(sent)["priority"] == 0
        assert "priority@1" in (named or "")
        headers = upstream.received[-1].headers
        assert not {"x-vllm-priority", "x-data-parallel-rank"} & {name.lower() for name in headers}


@pytest.mark.parametrize(
    ("caps", "priority"),
    [
        (Caps(priority=-5), -5),
        (Caps(urgency=Urgency.BATCH), 10),
        (Caps(urgency=Urgency.BATCH, priority=3), 3),
        (Caps(urgency=Urgency.INTERACTIVE), None),
    ],
)
async def test_a_rule_says_it_otherwise(caps: Caps, priority: int | None) -> None:
    rules = [RuleText("by hand", "true", Tier.STANDARD, caps)]
    async with world(TAKES, rules=rules) as (gw, upstream):
        auto = compact({"model": "auto", "messages": SAID})
        body, _ = await arrived(gw, upstream, body=auto, x_labels="workload=interactive")
        assert json.loads(body).get("priority") == priority


async def test_a_run_in_which_nobody_has_spoken_for_ten_minutes_works_alone() -> None:
    steps: list[Any] = [{"role": "user", "content": "hi"}]
    async with world(TAKES) as (gw, upstream):
        found = []
        for minutes_ago in (0, 9, 11):
            body, _ = await arrived(
                gw, upstream, body=compact({"model": "auto", "messages": steps}), x_task_id="run"
            )
            found.append(json.loads(body).get("priority"))
            run = gw.world.runs.known(gw.world.runs.tasks()[0])
            assert run is not None
            run.began_ms = gw.world.clock.now_ms() - minutes_ago * 60_000
            steps += [
                {"role": "assistant", "content": "a"},
                {"role": "tool", "content": "b", "tool_call_id": "1"},
            ]
        body, _ = await arrived(
            gw, upstream, body=compact({"model": "auto", "messages": steps}), x_task_id="run"
        )
        found.append(json.loads(body).get("priority"))
        assert found == [None, None, None, 10]
