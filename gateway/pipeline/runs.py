"""runs: what routing knows of a request's run, and what its answers teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gateway.core import bounds, runs
from gateway.core.cache_rules import Style
from gateway.core.catalog import Deployment, Operation
from gateway.core.dialects import media
from gateway.core.entry import ROUTE_NOTE, Attempt, Granted, Kind, Outcome
from gateway.core.identity import TaskSource
from gateway.core.rules import CacheFacts, OwnerFacts, RequestFacts, RuleContext, RuleSet, TimeFacts, Warmth
from gateway.core.runs import Held, Run, Thread
from gateway.core.switching import Terms, cache_rule_of, life_of, terms_of
from gateway.core.usage import Usage
from gateway.pipeline.exchange import Exchange, World

_LONG_LIFE_S = 3_600.0
#: Caches below this size are kept by nobody.
_LEAST_TOKENS = 1_024
#: What only the model that made it takes back: signed thoughts, sealed reasoning.
_BOUND = (b'"signature"', b'"encrypted_content"', b'"redacted_thinking"', b'"thought_signature"')
_LOOK_BACK = 64
#: A turn adds no more segments than these, as a rule; what adds more has gone on elsewhere.
_OWN_SEGMENTS = 4
_LABELS_MAX = 16
_NOTHING = RuleContext()


class _Binding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A thread as replicas tell one another: `held` is deployment -> [tokens, until (ms, wall clock), segments, link]."""

    home: str
    step: int
    began_ms: int
    spent_nano_usd: int
    context: int
    guess: int
    held: dict[str, tuple[int, int, int, bytes]]


_bindings = msgspec.json.Decoder(_Binding)


async def recall(world: World, x: Exchange) -> None:
    """Take over what another process knows of the thread, if it has gone on there."""
    if world.bindings is None or not x.chain or x.operation is Operation.COUNT_TOKENS:
        return
    if x.task.source is TaskSource.NEW:
        return
    name = _thread_name(x)
    run = world.runs.known(x.task.task_id)
    known = run.threads.get(name) if run is not None else None
    if known is not None and known.seen_to + _OWN_SEGMENTS >= len(x.chain):
        return
    text = await world.bindings.find(x.task.task_id, name)
    if text is None:
        return
    try:
        found = _bindings.decode(text)
    except msgspec.DecodeError:
        return  # of another version
    now_s, now_ms = world.clock.monotonic(), world.clock.now_ms()
    held = {
        deployment: Held(tokens, now_s + (until_ms - now_ms) / 1_000, segments, link)
        for deployment, (tokens, until_ms, segments, link) in found.held.items()
    }
    run = world.runs.take_over(x.task.task_id, _kind(x), found.began_ms, found.step, found.spent_nano_usd)
    run.thread(name).take_over(found.home, held, found.context, found.guess)


def _share(world: World, x: Exchange, run: Run, thread: Thread) -> None:
    if world.bindings is None:
        return
    now_s, now_ms = world.clock.monotonic(), world.clock.now_ms()
    held = {
        name: (h.tokens, now_ms + round((h.until_s - now_s) * 1_000), h.segments, h.link)
        for name, h in thread.held.items()
        if h.until_s > now_s
    }
    binding = _Binding(
        thread.home, run.step, run.began_ms, run.spent_nano_usd, thread.context, thread.guess, held
    )
    world.bindings.put(x.task.task_id, _thread_name(x), msgspec.json.encode(binding))


def _thread_name(x: Exchange) -> bytes:
    """By tools, system and the first message: what a thread never changes."""
    opening = len(x.facts.segments) - x.facts.message_count + 1
    return x.chain[min(max(1, opening), len(x.chain)) - 1]


def _kind(x: Exchange) -> str:
    return f"{x.caller.key_id}/{x.signal.client}/{x.signal.purpose}"


def join(world: World, x: Exchange) -> Thread | None:
    """Find the request's run and thread and count it there. None for what is no turn of a run."""
    if not x.chain or x.operation is Operation.COUNT_TOKENS:
        return None
    x.run = world.runs.asked(x.task.task_id, _kind(x), x.received_ms, spoken=x.spoken)
    x.thread = thread = x.run.thread(_thread_name(x))
    thread.came(world.clock.monotonic())
    return thread


def context(world: World, x: Exchange, rules: RuleSet, input_tokens: int) -> RuleContext:
    """Everything that these rules look at."""
    if not rules.rules:
        return _NOTHING
    facts, used, task_id = x.facts, rules.used, x.task.task_id
    request = RequestFacts(
        facts.model,
        x.operation.value,
        x.signal.client,
        x.signal.purpose,
        facts.stream,
        input_tokens,
        facts.max_output_tokens or 0,
        facts.tool_count,
        facts.last_role,
        facts.has_images and media.of(facts).images > 0,
        facts.reasoning_effort,
        labels_of(x.incoming.headers),
    )
    task = _NOTHING.task
    if x.run is not None and "task" in used:
        signs = world.watch.signs(task_id, world.breakers)
        task = world.runs.facts(
            x.run,
            x.received_ms,
            budget_used=world.runs.budget_used(f"task:{task_id}"),
            tool_errors=signs.tool_errors,
            repeats=signs.repeats,
            reading=_reading(world, task_id),
        )
    team = key = _NOTHING.key
    if "key" in used or "team" in used:
        record = x.caller.key
        key = OwnerFacts(
            record.key_id, record.name, world.runs.budget_used(f"key:{x.caller.key_id}"), record.labels
        )
        team = OwnerFacts(record.team_id, record.team_id, world.runs.budget_used(f"team:{record.team_id}"))
    return RuleContext(
        request,
        task,
        team,
        key,
        _warmth(world, x) if "cache" in used else _NOTHING.cache,
        TimeFacts.at(x.received_ms) if "time" in used else _NOTHING.time,
    )


def labels_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The request's own labels, from `x-labels: env=ci, workload=batch`; whatever else it holds is passed over."""
    text = headers.get("x-labels")
    if not text:
        return {}
    pairs = [pair.partition("=") for pair in text.split(",")[:_LABELS_MAX]]
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}


def _reading(world: World, task_id: str) -> bool:
    state = world.watch.state(task_id)
    ring = state.threads[0] if state is not None and state.threads else ()
    return bool(ring) and runs.only_reads(ring[-1].turn.tools)


def _warmth(world: World, x: Exchange) -> CacheFacts:
    if x.thread is None:
        return CacheFacts()
    now_s = world.clock.monotonic()
    found: dict[str, Warmth] = {}
    there = world.catalog().by_name
    for name in x.thread.held:
        d = there.get(name)
        if d is not None:
            warm = x.thread.warm(name, x.chain)
            if warm.at(now_s) > found.get(d.tier.value, Warmth()).warm_tokens:
                found[d.tier.value] = Warmth(warm.tokens, warm.until_s - now_s)
    return CacheFacts(**found)


def tool_call_open(world: World, x: Exchange) -> bool:
    """The model waits for results of its calls, with thoughts that no other model can take up."""
    if x.facts.last_role not in ("tool", "function_call_output"):
        return False
    state = world.watch.state(x.task.task_id)
    ring = state.threads[0] if state is not None and state.threads else ()
    if ring and any(not call.result for call in ring[-1].turn.calls):
        return True
    segments = x.facts.segments
    for at in range(len(segments) - 1, max(-1, len(segments) - 1 - _LOOK_BACK), -1):
        if segments[at].kind != "message":
            return False
        raw = segments[at].raw.tobytes()
        if any(mark in raw for mark in _BOUND):
            return True
        if b'"user"' in raw[:80] and b"tool_result" not in raw:
            return False
    return False


def terms(world: World, deployment: Deployment, now_ms: int) -> Terms | None:
    """What a token costs there; None without a price."""
    return terms_of(world.prices(), world.cache_rules(), deployment, now_ms)


def granted(world: World, scopes: Sequence[str], answer: Granted) -> None:
    """What the ledger said of the budgets."""
    if not answer.used:
        world.runs.forget_budgets(scopes)
        return
    named = {scope for scope, _ in answer.used}
    world.runs.forget_budgets([scope for scope in scopes if scope not in named])
    world.runs.learn_budgets(answer.used)


def ended(world: World, x: Exchange, attempt: Attempt, outcome: Outcome) -> Outcome:
    """What an attempt teaches about its run; the outcome, with the reason of its route in the note."""
    run, thread = x.run, x.thread
    if run is not None:
        run.spent_nano_usd += outcome.cost_nano_usd
    if thread is not None and outcome.kind is Kind.POST:
        usage = outcome.usage
        total = usage.input_total
        deployment = _named(world, x, attempt.deployment) if total else None
        if deployment is not None:
            held = _held(world, x, deployment, usage, total)
            guess = bounds.estimate_input_tokens(x.facts.size)
            thread.answered(deployment.name, held, total, guess, usage.output)
            if run is not None and thread.imagined is not None:
                world.runs.bills(run).observe(thread.imagined.answered(deployment.name, total, usage.output))
            if run is not None:
                _share(world, x, run, thread)
    if not x.route.rule and not x.route.instead_of:
        return outcome
    reason = f"{ROUTE_NOTE}{x.route.why}"
    return replace(outcome, note=f"{outcome.note}; {reason}" if outcome.note else reason)


def _named(world: World, x: Exchange, name: str) -> Deployment | None:
    # A fallback has left the candidates.
    return x.route.named(name) or world.catalog().by_name.get(name)


def _held(world: World, x: Exchange, deployment: Deployment, usage: Usage, input_tokens: int) -> Held | None:
    """What the deployment's cache holds after this answer."""
    rule = cache_rule_of(world.cache_rules(), deployment, x.received_ms)
    written = usage.cache_write
    tokens = usage.cache_read + written
    if not written and (rule is None or rule.style is not Style.EXPLICIT):
        least = rule.min_prefix_tokens if rule is not None and rule.min_prefix_tokens else _LEAST_TOKENS
        tokens = input_tokens if input_tokens >= least else 0
    if not tokens:
        return None
    life_s = _LONG_LIFE_S if usage.cache_write_1h or usage.cache_write_12h else life_of(rule)
    return Held(tokens, world.clock.monotonic() + life_s, len(x.chain), x.chain[-1])
