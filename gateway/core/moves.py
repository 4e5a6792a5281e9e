"""One request's lines that moved: what its run's system prompt is, and which notes stand in its conversation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from gateway.core import relocation
from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Facts, Splice
from gateway.core.lineages import Lineage, Lineages, Scope
from gateway.core.markers import Outline
from gateway.core.notes import Lines, Note, Notes, place

_PROMPTS_MAX = 10_000
_PLACED_MAX = 16_384


class Moved(msgspec.Struct):
    """`notes`: splices by segment, relative to it. `cut`: see `relocation.replaced`."""

    lines: tuple[bytes, ...]  # that do not stand in their place
    splices: list[Splice]
    cut: relocation.Cut | None
    notes: dict[int, tuple[Splice, ...]]
    diff: str  # of lines that move since this request
    #: the last note, with the hash of what is said before it, if other processes serve runs
    told: tuple[int, Note] | None


class Moves:
    """What is known of system prompts and of the places of notes, for all runs."""

    def __init__(self) -> None:
        self.shared = False  # other processes serve the same runs
        self.templates = relocation.Templates()
        self.prompts: OrderedDict[tuple[Scope, bytes], relocation.Prompt] = OrderedDict()
        self._placed: dict[tuple[int, Operation, Note], tuple[Splice, ...]] = {}

    def prompt(self, scope: Scope, system: relocation.SystemText) -> relocation.Prompt:
        """What is known of a system prompt, whichever run of these callers showed it."""
        name = (scope[:-1], system.template)
        found = self.prompts.setdefault(name, relocation.Prompt())
        self.prompts.move_to_end(name)
        if len(self.prompts) > _PROMPTS_MAX:
            self.prompts.popitem(last=False)
        return found

    def of(
        self,
        scope: Scope,
        facts: Facts,
        lineages: Lineages,
        lineage: Lineage,
        system: relocation.SystemText,
        outline: Outline,
        *,
        turns: bool,
        marks: bool,
        lapsed: bool,
        surely: bool,
    ) -> Moved | None:
        """None if all stands where it stood, or if there is no place for what is to be said. `turns`: the provider takes
        system turns in a conversation. `marks`: the system prompt can carry marks. `lapsed`: no cache holds an earlier
        request of the run any more, by what its provider promises; `surely`: and keeps none for longer."""
        places, said = lineage.places, lineage.notes
        prompt = self.prompt(scope, system)
        new, again = relocation.learn(places, prompt, system)
        first = outline.head + 1
        now = {i: system.lines[i] for i in system.candidates}
        if again:
            said.clear()
            # Another run's caches may hold all of it as it is now.
            if all(line in prompt.stood for line in now.items()):
                relocation.begin_all(places, prompt, now)
        links = said.follow(facts.segments, first)
        told = [at for at in range(outline.tail - first) if links[at] in said.known] if said.known else []
        missing = self._missing(places.lines, said, links, told, now)
        if missing and said.full and self.shared:
            return None
        anew = (bool(missing) and (lapsed or said.full)) or (bool(told) and lapsed and surely)
        if anew and not self.shared:
            # As if the run began here: others may hold what it says now. If it has too many notes, that is one miss.
            said.clear()
            relocation.begin_all(places, prompt, now)
            told, missing = [], ()
        placed = {first + at: self._place(facts, first + at, said.known[links[at]]) for at in told}
        if missing and not self._tell(facts, outline, said, links, missing, turns, placed):
            return None
        if not missing and outline.tail >= first:
            said.drop(links[outline.tail - first])
        lineages.weigh(lineage)
        lines = tuple(line for i, line in now.items() if i in places.ends or line != places.lines[i])
        if not lines and not placed:
            return None
        splices, cut = relocation.replaced(system, places, outline.head if marks else -1)
        diff = relocation.diff(system, places.lines, new) if new else ""
        at = outline.tail - first
        told_now = (links[at], said.known[links[at]]) if self.shared and missing else None
        return Moved(lines, splices, cut, placed, diff, told_now)

    @staticmethod
    def _missing(
        stands: Mapping[int, bytes],
        said: Notes,
        links: Sequence[int],
        told: Sequence[int],
        now: Mapping[int, bytes],
    ) -> Lines:
        """The lines that say something else than the model was last told of them."""
        last = {i: stands[i] for i in now}
        for at in told:
            last.update((i, line) for i, line in said.known[links[at]].lines if i in last)
        return tuple((i, line) for i, line in now.items() if last[i] != line)

    def _tell(
        self,
        facts: Facts,
        outline: Outline,
        said: Notes,
        links: Sequence[int],
        lines: Lines,
        turns: bool,
        placed: dict[int, tuple[Splice, ...]],
    ) -> bool:
        """Behind the last message that the next step keeps; False if nothing can stand there."""
        tail = outline.tail
        if tail <= outline.head:
            return False
        # Anthropic takes a system turn behind a user's only, not one behind another.
        follows = outline.message(tail + 1) if tail + 1 < len(facts.segments) else None
        alone = facts.operation is not Operation.MESSAGES or follows is None or not follows.system
        note = Note(lines, turns and alone)
        place = self._place(facts, tail, note)
        if place:
            said.put(links[tail - outline.head - 1], note)
            placed[tail] = place
        return bool(place)

    def _place(self, facts: Facts, at: int, note: Note) -> tuple[Splice, ...]:
        segment = facts.segments[at]
        known = (segment.key, facts.operation, note)
        found = self._placed.get(known) if segment.key else None
        if found is None:
            found = place(facts.operation, segment.raw.tobytes(), note)
            if len(self._placed) >= _PLACED_MAX:
                self._placed.clear()
            self._placed[known] = found
        return found
