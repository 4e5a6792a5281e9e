"""Providers that fail: who is asked next, what it costs, and how little of it clients see."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from gateway.core.catalog import Deployment, Tier
from gateway.core.entry import Amounts, Attempt, Granted, Kind, Refused
from gateway.core.errors import RateLimited, Unavailable
from gateway.core.health import HealthState, Status
from gateway.core.prices import PriceRow, Rates
from gateway.core.retries import RetryBudget
from gateway.core.rules import RuleSet, RuleText, Switch
from gateway.pipeline.places import Places
from tests.pipeline.fault_schedules import one_bad, play
from tests.pipeline.test_attempts import BODY, CHAT, OVERLOADED, says
from tests.support.recorder import Recorder, Script
from tests.support.small_world import MemoryLedger, SmallWorld, deployment, key_record, provider

SHORT = RuleText("short", "request.max_output_tokens == 7", Tier.STANDARD)


class Purse(MemoryLedger):
    """Admits what holds no more than it has."""

    def __init__(self, most_nano_usd: int) -> None:
        super().__init__()
        self.most_nano_usd = most_nano_usd
        self.refused_deployments: list[str] = []

    async def reserve(
        self, attempt: Attempt, scopes: Sequence[str], ask: Amounts, least: Amounts, *, landing: bool = False
    ) -> Granted | Refused:
        if (ask.nano_usd or 0) <= self.most_nano_usd:
            return await super().reserve(attempt, scopes, ask, least, landing=landing)
        self.refused_deployments.append(attempt.deployment)
        return Refused("key:k", self.most_nano_usd, 0, 0, None)


@pytest.mark.parametrize("seed", range(6))
async def test_random_faults_end_as_the_reference_model_says(seed: int) -> None:
    played = await play(seed, 25)
    assert played.seen == played.expected
    assert played.money == played.expected_money
    assert played.received == len(played.money), "an attempt without an entry, or an entry without an attempt"


async def test_one_bad_deployment_of_three_is_hardly_noticed() -> None:
    share = await one_bad(600)
    assert share.failed <= 0.001 * share.requests, share.text
    assert share.attempts <= 1.05 * share.requests, share.text


async def test_a_lone_deployment_is_asked_while_it_cools_and_is_back_with_its_first_answer() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [says(429, {"message": "slow"}, **{"Retry-After": "60"})]
        async with gw.http.post(CHAT, data=BODY) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (429, "60")
        assert gw.world.health["up/m"].status(gw.world.clock.monotonic()) is Status.COOLING
        async with gw.http.post(CHAT, data=BODY) as answer:
            assert answer.status == 200


async def test_the_first_call_after_an_ejection_probes_and_brings_it_back() -> None:
    async with Recorder() as a, Recorder() as b:
        pair = [deployment(provider(r.base_url, name=n)) for n, r in (("a", a), ("b", b))]
        async with SmallWorld(pair) as gw:
            now_s = gw.world.clock.monotonic()
            over = HealthState(open_until_s=now_s - 0.1, ejections=1, cause="failures")
            gw.world.health["a/m"] = over
            asked = []
            for _ in range(2):
                async with gw.http.post(CHAT, data=BODY) as answer:
                    asked.append(answer.headers["x-deployment"])
            assert gw.world.health["a/m"].status(gw.world.clock.monotonic()) is Status.CLOSED
            assert 0.1 <= gw.world.health["a/m"].share(gw.world.clock.monotonic()) < 0.2
            assert "a/m" in asked


async def test_a_provider_that_never_answers_is_left_after_its_time() -> None:
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, Recorder() as b:
        stalled = provider(f"http://127.0.0.1:{port}/v1", name="a", first_byte_timeout_s=0.1)
        pair = [deployment(stalled), deployment(provider(b.base_url, name="b"))]
        async with SmallWorld(pair) as gw:
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert (answer.status, answer.headers["x-deployment"]) == (200, "b/m")
            lines = await gw.settled()
            assert [(kind, error) for _, kind, _, error in lines] == [
                (Kind.CHARGE_UNKNOWN, "upstream_timeout"),
                (Kind.POST, ""),
            ]
        for writer in held:
            writer.close()
            await writer.wait_closed()


async def test_retries_are_a_tenth_of_the_traffic_and_a_few() -> None:
    async with Recorder() as a, Recorder() as b:
        pair = [deployment(provider(r.base_url, name=n)) for n, r in (("a", a), ("b", b))]
        async with SmallWorld(pair, retries=RetryBudget(grows_back_s=math.inf)) as gw:
            a.scripts = [says(500, {"message": "no"})] * 6
            statuses = []
            for _ in range(6):
                gw.world.health.clear()
                async with gw.http.post(CHAT, data=BODY) as answer:
                    statuses.append(answer.status)
            assert statuses == [*[200] * 5, 502]
            assert gw.world.retries.refused == 1
            lines = await gw.settled()
            assert [kind for _, kind, _, _ in lines] == [*[Kind.VOID, Kind.POST] * 5, Kind.VOID]


@pytest.mark.parametrize(("status", "tried"), [(401, ["a", "b"]), (402, ["a"]), (403, ["a", "b"])])
async def test_a_refused_credential_is_left_alone_and_somebody_is_told(status: int, tried: list[str]) -> None:
    async with Recorder() as a, Recorder() as b:
        pair = [deployment(provider(r.base_url, name=n)) for n, r in (("a", a), ("b", b))]
        async with SmallWorld(pair) as gw:
            a.scripts = [says(status, {"message": "pay first"})]
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert answer.status == (200 if len(tried) > 1 else 502)  # who pays is not changed silently
            await gw.settled()
            assert [attempt.provider for attempt, _ in gw.ledger.entries] == tried
            assert gw.world.health["credential:cred"].cause == "auth" or len(tried) > 1
            (kind, _, body), *more = gw.alerts
            assert (kind, body["provider"], body["status"], more) == ("credential_refused", "a", status, [])


async def test_a_provider_whose_quota_is_used_up_is_passed_by() -> None:
    async with Recorder() as a, Recorder() as b:
        pair = [deployment(provider(r.base_url, name=n)) for n, r in (("a", a), ("b", b))]
        async with SmallWorld(pair) as gw:
            limits = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m30s"}
            a.scripts = [Script(200, [_ANSWER], {"Content-Type": "application/json", **limits})]
            asked = []
            for _ in range(2):
                async with gw.http.post(CHAT, data=BODY) as answer:
                    asked.append(answer.headers["x-deployment"])
            assert asked == ["a/m", "b/m"]
            left_s = gw.world.health["a/m"].cooling_until_s - gw.world.clock.monotonic()
            assert 80 < left_s <= 90


_ANSWER = (
    b'{"id":"c","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":{"role":'
    b'"assistant","content":"ok"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)


async def test_a_prompt_that_is_too_long_goes_where_there_is_more_room() -> None:
    too_long = says(400, {"message": "too long", "code": "context_length_exceeded"})
    async with Recorder() as upstream:
        up = provider(upstream.base_url)
        tiers = [
            Deployment("tiny", up, "tiny", "tiny", "up/m", Tier.SMALL, context_tokens=1_000),
            Deployment("vast", up, "vast", "vast", "up/m", Tier.FAST, context_tokens=100_000),
        ]
        async with SmallWorld(tiers) as gw:
            upstream.scripts = [too_long]
            async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"small"')) as answer:
                assert (answer.status, answer.headers["x-deployment"], answer.headers["x-attempts"]) == (
                    200,
                    "vast",
                    "2",
                )
            upstream.scripts = [too_long]  # a pinned model stays the one that it is
            async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"tiny"')) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (
                    400,
                    "context_length_exceeded",
                )
        async with SmallWorld(tiers, record=key_record(models=frozenset({"tiny"}))) as gw:
            upstream.scripts = [too_long]  # nor does a key get to a model that it may not use
            async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"small"')) as answer:
                assert answer.status in (400, 404)


async def test_a_tier_falls_back_to_the_tiers_that_are_configured_for_it() -> None:
    async with Recorder() as upstream:
        up = provider(upstream.base_url)
        tiers = [
            Deployment("tiny", up, "tiny", "tiny", "up/m", Tier.SMALL),
            Deployment("big", up, "big", "big", "up/m", Tier.STANDARD),
        ]
        for fallbacks, status in (({}, 503), ({Tier.SMALL: (Tier.STANDARD,)}, 200)):
            async with SmallWorld(tiers, fallbacks=fallbacks, random=lambda: 0.0) as gw:
                upstream.scripts = [OVERLOADED] * (1 if fallbacks else 3)
                async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"small"')) as answer:
                    assert answer.status == status
                    task_id = answer.headers.get("x-task-id", "")
                await gw.settled()
                run = gw.world.runs.known(task_id)
                homes = [t.home for t in run.threads.values()] if run is not None else []
                assert homes == (["big"] if fallbacks else [])  # the binding moves with the answer


async def test_where_a_whole_tier_is_ill_its_fallback_is_asked_first_and_takes_no_retry() -> None:
    async with Recorder() as ill, Recorder() as well:
        tiers = [
            Deployment("tiny", provider(ill.base_url, name="ill"), "tiny", "tiny", "up/m", Tier.SMALL),
            Deployment("big", provider(well.base_url, name="well"), "big", "big", "up/m", Tier.STANDARD),
        ]
        fallbacks = {Tier.SMALL: (Tier.STANDARD,)}
        none_left = RetryBudget(grows_back_s=math.inf)
        while none_left.take("well", 0.0):
            pass
        async with SmallWorld(tiers, fallbacks=fallbacks, retries=none_left) as gw:
            now_s = gw.world.clock.monotonic()
            gw.world.health["tiny"] = HealthState(open_until_s=now_s + 60, ejections=1, cause="failures")
            told = []
            for _ in range(12):
                async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"small"')) as answer:
                    told.append((answer.headers["x-deployment"], answer.headers["x-attempts"]))
            assert (told, ill.received) == ([("big", "1")] * 12, [])
            assert answer.headers["x-route-reason"] == (
                "the client asked for tier small; nothing in tier small is well"
            )
            gw.world.health["tiny"] = HealthState(open_until_s=now_s - 1, ejections=1, cause="failures")
            async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"small"')) as answer:
                assert answer.headers["x-deployment"] == "tiny"  # probed


def dear_fallback(upstream: Recorder, ledger: Purse) -> SmallWorld:
    """Deployment tiny of the small tier, whose fallback is big, which is much dearer."""
    dear = PriceRow("up/big", "up/big@1", 0, Rates(30_000_000, 150_000_000, 3_000_000, 37_500_000))
    up = provider(upstream.base_url)
    tiers = [
        Deployment("tiny", up, "tiny", "tiny", "up/m", Tier.SMALL),
        Deployment("big", up, "big", "big", "up/big", Tier.STANDARD),
    ]
    return SmallWorld(tiers, ledger=ledger, more_prices=[dear], fallbacks={Tier.SMALL: (Tier.STANDARD,)})


async def test_who_cannot_pay_for_the_fallback_of_an_ill_tier_gets_the_tier() -> None:
    async with Recorder() as upstream:
        ledger = Purse(most_nano_usd=5_000_000)
        async with dear_fallback(upstream, ledger) as gw:
            gw.world.health["tiny"] = HealthState(
                open_until_s=gw.world.clock.monotonic() + 60, ejections=1, cause="failures"
            )
            async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"small"')) as answer:
                assert (answer.status, answer.headers["x-deployment"]) == (200, "tiny")
            assert ledger.refused_deployments == ["big"]


async def test_a_fallback_never_goes_where_the_key_may_not() -> None:
    async with Recorder() as ill, Recorder() as well:
        tiers = [
            Deployment(
                "tiny", provider(ill.base_url), "tiny", "tiny", "up/m", Tier.SMALL, context_tokens=2_000
            ),
            Deployment("big", provider(well.base_url), "big", "big", "up/m", Tier.STANDARD),
        ]
        virtual = {"only": RuleSet.compile([], Tier.SMALL), "both": RuleSet.compile([SHORT], Tier.SMALL)}
        too_long = says(400, {"message": "no", "code": "context_length_exceeded"})
        told: dict[tuple[str, str], list[object]] = {}
        for may, model in (
            ("small", "small"),
            ("tiny", "small"),
            ("only", "only"),
            ("both", "both"),
            ("auto", "auto"),
            ("", "small"),
        ):
            told[may, model] = []
            for failure in (OVERLOADED, too_long):
                async with SmallWorld(
                    tiers,
                    record=key_record(models=frozenset({may} - {""})),
                    fallbacks={Tier.SMALL: (Tier.STANDARD,)},
                    virtual=virtual,
                    rules=[RuleText("all", "true", Tier.SMALL, switch=Switch.ALWAYS)],
                ) as gw:
                    ill.scripts = [failure] * 3
                    async with gw.http.post(CHAT, data=BODY.replace(b'"m"', f'"{model}"'.encode())) as answer:
                        told[may, model].append(answer.headers.get("x-deployment", answer.status))
        no, yes = [503, 400], ["big", "big"]
        assert told == {
            ("small", "small"): no,
            ("tiny", "small"): no,
            ("only", "only"): no,
            ("both", "both"): yes,
            ("auto", "auto"): yes,
            ("", "small"): yes,
        }


async def test_a_fallback_that_the_budget_has_no_room_for_is_not_made_and_is_no_end_of_the_budget() -> None:
    async with Recorder() as upstream:
        ledger = Purse(most_nano_usd=5_000_000)
        async with dear_fallback(upstream, ledger) as gw:
            upstream.scripts = [OVERLOADED]
            shown = []
            for _ in range(2):  # what was refused is not remembered against the next request
                async with gw.http.post(CHAT, data=BODY.replace(b'"m"', b'"small"')) as answer:
                    code = (await answer.json()).get("error", {}).get("code")
                    shown.append((answer.status, code, answer.headers.get("x-deployment")))
            assert shown == [(503, "upstream_overloaded", None), (200, None, "tiny")]
            assert ledger.refused_deployments == ["big"]


async def test_a_drained_deployment_gets_nothing_unless_nothing_else_is_there() -> None:
    async with Recorder() as a, Recorder() as b:
        pair = [deployment(provider(r.base_url, name=n)) for n, r in (("a", a), ("b", b))]
        async with SmallWorld(pair) as gw:
            gw.world.health["a/m"] = HealthState(drained=True)
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert answer.headers["x-deployment"] == "b/m"
            gw.world.health["b/m"] = HealthState(drained=True)
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert answer.headers["x-deployment"] == "a/m"


# --- places ---------------------------------------------------------------------------------------------

ONE = deployment(provider("http://127.0.0.1:1/v1"), concurrent=1)


async def test_teams_take_turns_however_much_one_of_them_asks() -> None:
    places, order = Places(), []
    await places.enter(ONE, "first", "held")

    async def call(team: str, n: int) -> None:
        await places.enter(ONE, team, f"{team}{n}")
        order.append(f"{team}{n}")
        places.leave(f"{team}{n}")

    async with asyncio.TaskGroup() as group:
        for team, n in (("loud", 1), ("loud", 2), ("loud", 3), ("quiet", 1)):
            group.create_task(call(team, n))
        while places.counts()["up/m", "waiting"] < 4:
            await asyncio.sleep(0)
        places.leave("held")
    assert order == ["loud1", "quiet1", "loud2", "loud3"]
    assert places.counts() == {("up/m", "inside"): 0, ("up/m", "waiting"): 0}


async def test_a_full_queue_and_a_slow_one_are_said_so_with_a_time_to_come_back() -> None:
    places = Places(wait_max_s=0.01)
    await places.enter(ONE, "t", "held")
    with pytest.raises(Unavailable) as slow:
        await places.enter(ONE, "t", "late")
    assert (slow.value.status, slow.value.retry_after_s) == (503, 2)
    waiting = [asyncio.ensure_future(places.enter(ONE, "t", f"w{n}")) for n in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited) as full:
        await places.enter(ONE, "t", "one too many")
    assert (full.value.status, full.value.retry_after_s) == (429, 2)
    assert [type(e) for e in await asyncio.gather(*waiting, return_exceptions=True)] == [Unavailable] * 4
    places.leave("held")
    assert places.counts() == {("up/m", "inside"): 0, ("up/m", "waiting"): 0}


async def test_a_caller_who_leaves_the_queue_takes_no_place_with_it() -> None:
    places = Places()
    await places.enter(ONE, "t", "held")
    gone = asyncio.ensure_future(places.enter(ONE, "t", "gone"))
    await asyncio.sleep(0)
    places.leave("held")  # the place is given to one who leaves in the same moment
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert places.counts() == {("up/m", "inside"): 0, ("up/m", "waiting"): 0}
    await places.enter(ONE, "t", "next")


async def test_a_place_is_taken_until_the_answer_is_whole() -> None:
    async with Recorder() as a, Recorder() as b:
        one = deployment(provider(a.base_url, name="a"), concurrent=1)
        two = deployment(provider(b.base_url, name="b"), priority=1)
        async with SmallWorld([one, two]) as gw:
            await gw.world.places.enter(one, "team1", "another call")
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert answer.headers["x-deployment"] == "b/m"  # it has room
            gw.world.places.leave("another call")
            for _ in range(2):
                async with gw.http.post(CHAT, data=BODY) as answer:
                    assert answer.headers["x-deployment"] == "a/m"
            assert gw.world.places.counts() == {("a/m", "inside"): 0, ("a/m", "waiting"): 0}
