"""What providers said about the size of prompts, so that a prompt which extends a known one has a tight bound.

An agent's step is the step before and a little more. What the provider billed for the step before bounds all but the
new part, and that is bounded by its bytes: a fraction of what the bytes of the whole history would reserve.

    bound of a step = tokens of the longest known prefix + bytes of what follows it

A prefix is known whole (some request ended there), or as the beginning of requests that went on: then it has at most
the tokens of the shortest of them. Both are facts about a rendered prompt, so they hold for one deployment and for
requests of equal settings only (`group`). No bound is a guess, and losing it only loosens bounds. The average of tokens per
byte that is learned beside them is for estimates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gateway.core import bounds
from gateway.core.catalog import Deployment
from gateway.core.dialects import media
from gateway.core.dialects.facts import Facts
from gateway.core.dialects.media import Media

#: Markers and one-block lists come and go between steps without changing the chain (`core.prefix`), nor the tokens.
_SLACK_BYTES = 1_024
#: A step extends the one before by a few messages; who adds more than these is looked for among the openings.
_STEP_LINKS = 32
#: Links that are remembered of every request: tools, system, first message. Other sessions begin alike.
OPENING = 3

#: Members that change neither what is rendered nor how. All others must be equal where two prompts are compared.
_PLAIN = frozenset(
    [
        "model",
        "messages",
        "input",
        "tools",
        "system",
        "instructions",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stop_sequences",
        "metadata",
        "client_metadata",
        "user",
        "session_id",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "cache_control",
        "store",
        "service_tier",
        "presence_penalty",
        "frequency_penalty",
        "logprobs",
        "top_logprobs",
        "include",
        "diagnostics",
    ]
)
#: These stand for text that is kept elsewhere: no byte of the request bounds it.
_ELSEWHERE = frozenset({"previous_response_id", "conversation", "prompt", "plugins", "container"})
#: With these a provider drops parts of a prompt as it sees fit, so that a longer prompt may keep what a shorter lost.
_EDITED = frozenset({"truncation", "transforms"})
_EDITS = "context_management"
#: Dropping old thinking only ever makes a prompt shorter (Anthropic, context editing, 2026-11; Claude Code's default).
_EDIT_TYPE = re.compile(rb'"type"\s*:\s*"([^"]*)"')
_HARMLESS_EDITS = (b"clear_thinking", b"thinking_turns", b"all")
#: Segments, and what is for people or programs and never in a prompt.
_SEGMENT_MEMBERS = frozenset(
    {"tools", "system", "instructions", "messages", "input", "metadata", "client_metadata"}
)
#: The average of a deployment is over about so many prompts; an estimate is so much above it.
_MEAN_OVER = 32
_MARGIN = 1.1
#: The bytes of a shorter body bound it well enough.
LEAST_BYTES = 4 << 10


class Prompt(msgspec.Struct, frozen=True):
    """One request as far as prompts are compared.

    `group`: a hash of who asks and of the settings that change what is rendered; None = it compares with nothing.
    `elsewhere`: it stands for text that is not in it. `segment_bytes`: of tools, system and messages, and of metadata.
    """

    facts: Facts
    media: Media
    elsewhere: bool
    group: int | None = None
    segment_bytes: int = 0

    @classmethod
    def of(cls, facts: Facts, body: bytes, owner: str) -> Prompt:
        """Of a request whose facts were read from `body`; only those of one owner are compared."""
        spans, found = facts.spans.members, media.of(facts)
        elsewhere = not _ELSEWHERE.isdisjoint(spans) and any(
            body[slice(*spans[name])] != b"null" for name in _ELSEWHERE & spans.keys()
        )
        if facts.size < LEAST_BYTES:
            return cls(facts, found, elsewhere)
        names = spans.keys() - _PLAIN
        if not _EDITED.isdisjoint(names) or (
            _EDITS in names and not _only_shortens(body[slice(*spans[_EDITS])])
        ):
            return cls(facts, found, elsewhere)
        settings: list[str | bytes] = [owner, facts.operation]
        for name in sorted(names):
            start, end = spans[name]
            settings += (name, body[start:end])
        segment_bytes = sum([spans[name][1] - spans[name][0] for name in _SEGMENT_MEMBERS & spans.keys()])
        return cls(facts, found, elsewhere, hash(tuple(settings)), segment_bytes)

    def bytes_after(self, links: int) -> int:
        """Bytes of everything but the first `links` segments. Looks only at the shorter side."""
        segments = self.facts.segments
        if links <= OPENING:
            return self.facts.size - sum([segments[i].raw.nbytes for i in range(links)])
        # one byte more for what stands between two
        added = sum([segments[i].raw.nbytes + 1 for i in range(links, len(segments))])
        return self.facts.size - self.segment_bytes + added


class _Seen(NamedTuple):
    tokens: int
    size: int  # bytes
    images: int
    image_bytes: int
    whole: bool  # a request ended here


_Key = tuple[str, int | None, bytes]


class KnownPrompts:
    """Bounded: two generations of `capacity` links each, about 300 bytes a link. Links are those of `prefix.chain`."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._young: dict[_Key, _Seen] = {}
        self._old: dict[_Key, _Seen] = {}
        self._distrusted: set[str] = set()
        self._per_kib: dict[str, float] = {}  # tokens per 1,024 bytes of body, by deployment

    def bound(self, deployment: Deployment, links: Sequence[bytes], prompt: Prompt) -> int | None:
        """The most input tokens that `deployment` can bill for a prompt whose chain is `links`; None = nothing bounds it.

        The less of two: the bytes of everything, and what it reported for the longest known prefix with the bytes of
        what follows. An average of bytes per token would be no third: whatever the margin, there are texts of one
        token a byte.
        """
        facts, found = prompt.facts, prompt.media
        each = deployment.provider.image_tokens_max
        if prompt.elsewhere or found.opaque or (found.images and each is None):
            return None
        each = each or 0
        by_bytes = bounds.input_bound_tokens(
            facts.size - found.image_bytes, facts.message_count, facts.tool_count
        )
        by_bytes += found.images * each
        if prompt.group is None or deployment.name in self._distrusted:
            return by_bytes
        found_at = self._longest(deployment.name, links, prompt)
        if found_at is None:
            return by_bytes
        i, known, after = found_at
        new = max(0, after - max(0, found.image_bytes - known.image_bytes))
        tokens = known.tokens + bounds.added_bound_tokens(new, len(facts.segments) - i - 1)
        # An image at an address is counted again: there may be another one by now.
        again = max(0, found.images - known.images) + found.remote
        return min(by_bytes, tokens + again * each)

    def estimate(self, deployment: Deployment, links: Sequence[bytes], prompt: Prompt) -> int:
        """The probable input tokens, for an answer whose usage is lost: what was reported for the longest known prefix,
        and for the rest this deployment's own average, with a margin. Never more than the bound."""
        found_at = None if prompt.group is None else self._longest(deployment.name, links, prompt)
        reported, size = 0, prompt.facts.size - prompt.media.image_bytes
        if found_at is not None:
            _, known, after = found_at
            reported = known.tokens
            size = max(0, after - max(0, prompt.media.image_bytes - known.image_bytes))
        per_kib = self._per_kib.get(deployment.name)
        if per_kib is None:
            tokens = reported + bounds.estimate_input_tokens(size)
        else:
            tokens = reported + round(size * per_kib * _MARGIN) // 1_024
        most = self.bound(deployment, links, prompt)
        return tokens if most is None else min(tokens, most)

    def _longest(
        self, deployment: str, links: Sequence[bytes], prompt: Prompt
    ) -> tuple[int, _Seen, int] | None:
        """The last known link, what is known of it, and the bytes behind it."""
        young, old, key = self._young, self._old, (deployment, prompt.group)
        n = len(links)
        last = max(0, n - _STEP_LINKS)
        for i in range(n - 1, -1, -1):
            if OPENING <= i < last:
                continue
            link = (*key, links[i])
            known = young.get(link) or old.get(link)
            if known is None:
                continue
            after = prompt.bytes_after(i + 1)
            # A link is a fast hash, and whoever sends the prompt chooses what is hashed: so a beginning that is
            # larger than the known one is not taken for it.
            if prompt.facts.size - after <= known.size + _SLACK_BYTES:
                return i, known, after
        return None

    def note(self, deployment: str, links: Sequence[bytes], prompt: Prompt, tokens: int) -> None:
        """A provider billed `tokens` of input for this prompt, whose chain is `links`."""
        group, found = prompt.group, prompt.media
        if group is None or not links or tokens <= 0 or deployment in self._distrusted:
            return
        n, size = len(links), prompt.facts.size
        if not found.images:
            per_kib = tokens * 1_024 / size
            mean = self._per_kib.get(deployment, per_kib)
            self._per_kib[deployment] = mean + (per_kib - mean) / _MEAN_OVER
            for i in range(min(OPENING, n - 1)):
                key = (deployment, group, links[i])
                seen = self._get(key)
                if seen is None or (not seen.whole and tokens < seen.tokens):
                    self._put(key, _Seen(tokens, size - prompt.bytes_after(i + 1), 0, 0, False))
        elif n != len(prompt.facts.segments):
            return  # some of the images may be in what the chain leaves out
        key = (deployment, group, links[-1])
        seen = self._get(key)
        if seen is not None and seen.whole:
            tokens = max(tokens, seen.tokens)
        self._put(key, _Seen(tokens, size - prompt.bytes_after(n), found.images, found.image_bytes, True))

    def distrust(self, deployment: str) -> bool:
        """It billed more than its bound: from now on only bytes bound what goes there. False if that was so before."""
        known = deployment in self._distrusted
        self._distrusted.add(deployment)
        return not known

    def _get(self, key: _Key) -> _Seen | None:
        return self._young.get(key) or self._old.get(key)

    def _put(self, key: _Key, seen: _Seen) -> None:
        if len(self._young) >= self._capacity:
            self._old, self._young = self._young, {}
        self._young[key] = seen


def _only_shortens(edits: bytes) -> bool:
    return all(kind.startswith(_HARMLESS_EDITS) for kind in _EDIT_TYPE.findall(edits))
