"""A fleet of replicas with a clock, and what happens to it in short words."""

from __future__ import annotations

from gateway.core.replicas.chain import Chain, links_of
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.scrape import Scrape
from gateway.core.replicas.terms import Ask, End, EndKind, FleetPolicy, Health, Pick, ReplicaShown

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
#: Four bytes a token, which is also what a fleet begins with.
SYSTEM = b"system prompt " * 2_926  # 10,241 tokens


def ask(text: bytes, thread: str = "", *, streams: bool = True) -> Ask:
    return Ask(Chain(links_of(text, 1), len(text)), thread, streams=streams)


def history(thread: str, turns: int) -> Ask:
    """The system prompt that all share, and 1,000 tokens a turn."""
    said = b"".join(f"{thread}{n}".encode().ljust(4_000, b".") for n in range(turns))
    return ask(SYSTEM + said, thread)


class Told:
    def __init__(self, *addresses: str, **policy: object) -> None:
        self.now_s = 0.0
        self.fleet = Fleet(FleetPolicy(**{"tau_tokens": 100_000, **policy}))  # type: ignore[arg-type]
        self.fleet.members(addresses or (A, B), 0.0)
        self._count = 0

    def pick(self, asked: Ask, chance: float = 0.5, avoid: tuple[str, ...] = ()) -> Pick:
        pick = self.fleet.pick(asked, self.now_s, chance, avoid)
        assert pick is not None
        return pick

    def send(self, asked: Ask, to: str = "") -> tuple[str, Pick]:
        """To whom it is picked for, or to whom it is told."""
        others = tuple(r.address for r in self.shown() if to and r.address != to)
        pick = self.pick(asked, avoid=others)
        self._count += 1
        self.fleet.sent(f"a{self._count}", asked, pick, self.now_s)
        return f"a{self._count}", pick

    def answer(self, asked: Ask, to: str = "", cached: int | None = None, tokens: int = 0) -> Pick:
        """A request from beginning to end; what is cached is what was predicted, unless told."""
        attempt, pick = self.send(asked, to)
        self.fleet.first_chunk(attempt, self.now_s)
        read = pick.predicted_cached_tokens if cached is None else cached
        self.end(attempt, EndKind.OK, prompt_tokens=tokens or asked.prompt_chars // 4, cached_tokens=read)
        return pick

    def end(self, attempt: str, kind: EndKind, **more: float) -> None:
        self.fleet.ended(attempt, End(kind, **more), self.now_s)  # type: ignore[arg-type]

    def scrape(self, address: str, **seen: object) -> None:
        self.fleet.scraped(address, Scrape(**seen), self.now_s)  # type: ignore[arg-type]

    def shown(self) -> tuple[ReplicaShown, ...]:
        return self.fleet.shown(self.now_s)

    def of(self, address: str) -> ReplicaShown:
        return next(r for r in self.shown() if r.address == address)

    def health(self) -> list[Health]:
        return [r.health for r in self.shown()]
