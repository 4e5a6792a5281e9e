"""What a deployment of one's own says of its server: the price of its hours, its caches, its queue."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from gateway.core.gpu_price import GpuPrice
from gateway.core.serving import CacheSalt, QueuePolicy, Serving
from gateway.settings.section import Section

_MOST_TOKENS_PER_S = 1_000_000_000
_DAY_S = 86_400


def read_serving(item: Section, gpu: GpuPrice | None) -> Serving:
    """`item` is an entry of `deployments`."""
    default = QueuePolicy()
    queue = item.section("queue")
    policy = QueuePolicy(
        wait_max_s=queue.number("wait_max_s", default.wait_max_s, 0.01, _DAY_S),
        batch_wait_max_s=queue.number("batch_wait_max_s", 0.0, 0.01, _DAY_S) or None,
        waiting_max=queue.optional_integer("waiting_max", 1, 1_000_000),
        batch_turn_after_s=queue.number("batch_turn_after_s", default.batch_turn_after_s, 0, _DAY_S),
    )
    queue.done()
    per_replica = item.optional_integer("concurrent_per_replica", 1, 100_000)
    if per_replica is not None and "concurrent" in item:
        item.wrong("concurrent_per_replica", "says with `concurrent` twice how many calls there may be")
    if "queue" in item and per_replica is None and "concurrent" not in item:
        item.wrong(
            "queue", "nobody waits where there is no limit", "give `concurrent` or `concurrent_per_replica`"
        )
    return Serving(
        item.optional_choice("cache_salt", CacheSalt),
        item.flag("takes_priority", False),
        per_replica,
        policy,
        gpu,
    )


def read_gpu_price(item: Section) -> GpuPrice | None:
    """`price: {gpu: {...}}` of an entry of `deployments`; None if it has none, or a wrong one."""
    if "price" not in item or item.is_single("price") or "gpu" not in item.section("price"):
        return None
    section = item.section("price").section("gpu")
    nano_usd = section.nano_usd("usd_per_replica_hour")
    reads = section.optional_integer("input_tokens_per_s", 1, _MOST_TOKENS_PER_S)
    cached = section.optional_integer("cached_tokens_per_s", 1, _MOST_TOKENS_PER_S)
    writes = section.optional_integer("output_tokens_per_s", 1, _MOST_TOKENS_PER_S)
    for key, hint in (
        ("usd_per_replica_hour", 'dollars for one replica, all its GPUs together, for example "2.50"'),
        ("input_tokens_per_s", "`tollhouse calibrate` measures it"),
        ("output_tokens_per_s", "`tollhouse calibrate` measures it"),
    ):
        if key not in section:
            section.wrong(key, "is required", hint)
    share = _milli(section, "utilisation", 600)
    section.done()
    if nano_usd is None or reads is None or writes is None:
        return None
    try:
        price = GpuPrice(nano_usd, reads, writes, cached, share)
        price.rates  # noqa: B018 - a rate may be more than a price can be
    except ValueError as error:
        section.wrong("", str(error))
        return None
    return price


def _milli(section: Section, key: str, default: int) -> int:
    """A share of one, exact to a thousandth."""
    text = section.text(key)
    if not text:
        return default
    try:
        exact = Decimal(text) * 1_000
        milli = int(exact)
    except (InvalidOperation, OverflowError, ValueError):
        exact, milli = Decimal(0), 0
    if exact != milli or not 1 <= milli <= 1_000:
        section.wrong(key, f"must be above 0 and at most 1, in thousandths, not {text!r}", "for example 0.6")
        return default
    return milli
