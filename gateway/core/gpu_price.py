"""What a token costs on a server that is paid by the hour.

A token of a class occupies a replica for 1 / (tokens per second of that class, measured while it does nothing else).
The hour's dollars are spread over the seconds in which a replica serves, `utilisation` of the hour:

    price of a token = dollars per replica-hour / (3600 s x utilisation x tokens per second)

rounded up once, to whole pico-dollars. So a replica that is busy for just that share of its time charges exactly what it
costs; what it costs beyond its charges is idle time, and is shown apart (`GpuMeter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.rates import MAX_RATE_PICO_USD, Rates

_PICO_PER_NANO = 1_000
_HOUR_S = 3_600
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """Measured at one replica. `cached_tokens_per_s` None = nobody has measured: a cached token costs like another.

    `utilisation_milli`: the share of an hour that is sold, in thousandths.
    """

    nano_usd_per_replica_hour: int
    input_tokens_per_s: int
    output_tokens_per_s: int
    cached_tokens_per_s: int | None = None
    utilisation_milli: int = 600

    def __post_init__(self) -> None:
        if self.nano_usd_per_replica_hour < 0:
            raise ValueError("a replica's hour cannot cost less than nothing")
        if not 1 <= self.utilisation_milli <= 1_000:
            raise ValueError(
                f"utilisation must be above 0 and at most 1, not {self.utilisation_milli / 1000}"
            )
        rates = (self.input_tokens_per_s, self.output_tokens_per_s, self.cached_tokens_per_s)
        if any(rate is not None and rate < 1 for rate in rates):
            raise ValueError("a replica serves at least one token a second")
        if self.cached_tokens_per_s is not None and self.cached_tokens_per_s < self.input_tokens_per_s:
            raise ValueError("a cached token cannot take longer than one that is not")

    @property
    def rates(self) -> Rates:
        """The same price per token. Raises `ValueError` where that is more than any price may be."""
        cached = self.cached_tokens_per_s
        return Rates(
            input=self._pico_usd(self.input_tokens_per_s),
            output=self._pico_usd(self.output_tokens_per_s),
            cache_read=None if cached is None else self._pico_usd(cached),
        )

    def _pico_usd(self, tokens_per_s: int) -> int:
        dollars = self.nano_usd_per_replica_hour * _PICO_PER_NANO * 1_000
        pico_usd = -(-dollars // (_HOUR_S * self.utilisation_milli * tokens_per_s))
        if pico_usd > MAX_RATE_PICO_USD:
            raise ValueError(f"{tokens_per_s} tokens a second make a token dearer than a price may be")
        return pico_usd


@dataclass(frozen=True, slots=True)
class GpuBill:
    """What one deployment's replicas have cost since this process began, and what was charged for their work."""

    replica_ms: int
    cost_nano_usd: int
    charged_nano_usd: int
    sold_milli: int  # the share of an hour at which charges pay for it

    @property
    def idle_nano_usd(self) -> int:
        """What nobody paid for; negative where the replicas were busier than their price assumes."""
        return self.cost_nano_usd - self.charged_nano_usd

    @property
    def utilisation(self) -> float:
        """The share of their time for which the replicas were paid, as the price counts it. 1 = all of it."""
        return (
            self.sold_milli / 1_000 * self.charged_nano_usd / self.cost_nano_usd
            if self.cost_nano_usd
            else 0.0
        )


class GpuMeter:
    """Counts replica-hours and charges, by deployment.

    It forgets both together when the process ends: a difference of the two is right over any time in which the
    process ran, and the ledger keeps all charges. Each process counts all replicas, but only its own charges.
    """

    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._replica_ms: dict[str, int] = {}
        self._cost: dict[
            str, int
        ] = {}  # nano-dollars x milliseconds of an hour, so that nothing is rounded away
        self._charged: dict[str, int] = {}
        self._prices: dict[str, GpuPrice] = {}

    def tick(self, now_ms: int, prices: Mapping[str, GpuPrice], live: Mapping[str, int]) -> None:
        """Up to now, since the last tick, so many replicas of each deployment were there. `now_ms` is monotonic."""
        before, self._at_ms = self._at_ms, now_ms
        elapsed_ms = 0 if before is None else max(0, now_ms - before)
        for name, price in prices.items():
            served_ms = live.get(name, 0) * elapsed_ms
            self._prices[name] = price
            self._replica_ms[name] = self._replica_ms.get(name, 0) + served_ms
            self._cost[name] = self._cost.get(name, 0) + served_ms * price.nano_usd_per_replica_hour

    def charged(self, deployment: str, nano_usd: int) -> None:
        self._charged[deployment] = self._charged.get(deployment, 0) + nano_usd

    def bills(self) -> dict[str, GpuBill]:
        return {
            name: GpuBill(
                self._replica_ms[name],
                self._cost[name] // _HOUR_MS,
                self._charged.get(name, 0),
                price.utilisation_milli,
            )
            for name, price in self._prices.items()
        }
