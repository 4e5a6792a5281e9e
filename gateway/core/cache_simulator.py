"""What a provider's prompt cache makes of a run, by its documented rules (config/providers.yaml). Pure.

A prompt is a row of content blocks. Each block has a rolling digest of all that is rendered up to its end, so two
prompts share a prefix exactly where they share a digest. Three kinds of caches, by the rule's row:
- explicit (Anthropic): an entry is written at each marker, and found from a marker by looking back over blocks;
- both, looking back over message ends (OpenAI from GPT-5.6 on): the end of the latest message is marked by itself;
- all others: any common beginning is found, rounded down to the provider's granularity; nothing is paid for writes.

Written apart from the demo provider's cache (`demo/cache.py`): the two are held against each other in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from gateway.core.bounds import estimate_input_tokens
from gateway.core.cache_rules import MARKERS, CacheRule, KeyMeans, Life, LookbackUnit, Style
from gateway.core.catalog import Operation
from gateway.core.misses import SETTINGS
from gateway.core.usage import Usage

#: Template tokens in front of every message.
MESSAGE_TOKENS = 3
#: An image or a file, whatever its size.
MEDIA_TOKENS = 1_500
#: How long an entry lives where its provider promises nothing.
BEST_EFFORT_S = 3_600
_MEDIA = ("image", "file", "document", "audio")
_LONG = {"1h": "cache_write_1h", "12h": "cache_write_12h"}

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Block:
    """`digest` and `tokens` are those of the prompt up to the end of this block. `life` names a marker's TTL, "" = the
    default one; None = no marker."""

    digest: bytes
    tokens: int
    life: str | None = None
    message_end: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`automatic`: the TTL of a marker that the provider is to place itself (Anthropic's top-level cache_control)."""

    blocks: tuple[Block, ...]
    automatic: str | None = None
    implicit: bool = True  # OpenAI: prompt_cache_options.mode is not "explicit"

    @property
    def tokens(self) -> int:
        return self.blocks[-1].tokens if self.blocks else 0


class TooManyMarkers(ValueError):
    """The provider answers 400."""


@dataclass(slots=True)
class CacheSimulator:
    """One provider's cache for one model. Times are milliseconds since 1970 UTC."""

    rule: CacheRule
    _entries: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # digest -> (expires_ms, life_ms)

    def ask(self, prompt: Prompt, now_ms: int) -> Usage:
        """How the input of a request is billed; what it writes can be read by the next one."""
        rule = self.rule
        if rule.style is Style.EXPLICIT:
            return self._marked(prompt, self._explicit(prompt), now_ms)
        if rule.style is Style.BOTH and rule.lookback_unit is LookbackUnit.MESSAGE_END:
            return self._marked(prompt, self._implicit(prompt), now_ms)
        return self._any_beginning(prompt, now_ms)

    # --- caches with markers -----------------------------------------------------------------------------

    def _explicit(self, prompt: Prompt) -> tuple[dict[int, Life], set[int]]:
        """Which blocks are written, with their lives, and at which entries are looked for."""
        marks = {i: self._life(b.life) for i, b in enumerate(prompt.blocks) if b.life is not None}
        if prompt.automatic is not None and prompt.blocks:
            marks.setdefault(len(prompt.blocks) - 1, self._life(prompt.automatic))
        if len(marks) > (self.rule.max_breakpoints or 0):
            raise TooManyMarkers(f"{len(marks)} markers, and at most {self.rule.max_breakpoints} are taken")
        back = self.rule.lookback or 1
        return marks, {i - n for i in marks for n in range(back) if i >= n}

    def _implicit(self, prompt: Prompt) -> tuple[dict[int, Life], set[int]]:
        rule, blocks = self.rule, prompt.blocks
        marked = [i for i, b in enumerate(blocks) if b.life is not None]
        looked = {*marked[: rule.explicit_first or 0], *marked[-(rule.explicit_latest or len(marked) or 1) :]}
        if prompt.implicit and blocks:
            marked = sorted({*marked, len(blocks) - 1})
            ends = [i for i, b in enumerate(blocks) if b.message_end]
            looked.update(ends[-((rule.lookback or 0) + 1) :])
        return {i: self._life(blocks[i].life) for i in marked[-(rule.max_breakpoints or 1) :]}, looked

    def _marked(self, prompt: Prompt, found: tuple[dict[int, Life], set[int]], now_ms: int) -> Usage:
        marks, looked = found
        blocks = prompt.blocks
        least = self.rule.min_prefix_tokens or 0
        marks = {i: life for i, life in marks.items() if blocks[i].tokens >= least}
        hit = max((i for i in looked if self._alive(blocks[i].digest, now_ms)), default=-1)
        read = blocks[hit].tokens if hit >= 0 else 0
        if hit >= 0:
            self._refresh(blocks[hit].digest, now_ms)
        classes = {"cache_write_5m": 0, "cache_write_1h": 0, "cache_write_12h": 0}
        written = read
        # From the hit on, each token is written in the class of the next marker.
        for i in sorted(marks):
            life = marks[i]
            name = _LONG.get(life.name, "cache_write_5m")
            classes[name] += max(0, blocks[i].tokens - written)
            written = max(written, blocks[i].tokens)
            if not (self._alive(blocks[i].digest, now_ms) and self._refresh(blocks[i].digest, now_ms)):
                self._write(blocks[i].digest, life, now_ms)
        return Usage(input_uncached=prompt.tokens - written, cache_read=read, **classes)

    # --- caches without --------------------------------------------------------------------------------------

    def _any_beginning(self, prompt: Prompt, now_ms: int) -> Usage:
        blocks = prompt.blocks
        step = self.rule.granularity_tokens or 1
        read = max((b.tokens for b in blocks if self._alive(b.digest, now_ms)), default=0) // step * step
        if read < (self.rule.min_prefix_tokens or 0):
            read = 0
        for block in blocks:
            self._write(block.digest, self._life(""), now_ms)
        return Usage(input_uncached=prompt.tokens - read, cache_read=read)

    # --- entries -----------------------------------------------------------------------------------------------

    def _life(self, name: str | None) -> Life:
        lives = self.rule.lives or (Life("default", None, True, 1_000),)
        return next((life for life in lives if life.name == name), lives[0])

    def _write(self, digest: bytes, life: Life, now_ms: int) -> None:
        life_ms = 1_000 * (BEST_EFFORT_S if life.life_s is None else life.life_s)
        self._entries[digest] = (now_ms + life_ms, life_ms)

    def _refresh(self, digest: bytes, now_ms: int) -> bool:
        _, life_ms = self._entries[digest]
        self._entries[digest] = (now_ms + life_ms, life_ms)
        return True

    def _alive(self, digest: bytes, now_ms: int) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and now_ms < entry[0]


# --- a request's body as a prompt ---------------------------------------------------------------------------


def count_by_size(text: str) -> int:
    """Tokens by the size of a text: without a provider's tokenizer."""
    return estimate_input_tokens(len(text.encode("utf-8", "replace")))


def read_prompt(rule: CacheRule, operation: Operation, body: bytes, count: Count = count_by_size) -> Prompt:
    """What a provider renders of a body. The body is one that was accepted: nothing is checked here."""
    request: dict[str, Any] = msgspec.json.decode(body)
    sections = list(_sections(operation, request))
    settings = {name: request[name] for name in sorted(SETTINGS & request.keys())}
    if rule.key_means is KeyMeans.ROUTING:
        settings.pop("prompt_cache_key", None)
    # OpenAI hashes settings before all else, Anthropic most of them before the messages.
    first = operation is Operation.MESSAGES
    seed = "" if first else _compact(settings)
    digest, tokens = xxhash.xxh3_128_digest(f"{request.get('model')}\n{seed}".encode()), 0
    blocks: list[Block] = []
    for kind, role, parts in sections:
        tokens += MESSAGE_TOKENS
        head = role
        if first and kind == "message":
            head, first = f"{_compact(settings)}\n{role}", False
        for i, (text, life, size) in enumerate(parts):
            digest = xxhash.xxh3_128_digest(digest + f"{head}\n{text}".encode("utf-8", "replace"))
            tokens += count(text) if size is None else size
            blocks.append(Block(digest, tokens, life, i + 1 == len(parts), text))
            head = role
    options = request.get("prompt_cache_options")
    return Prompt(
        tuple(blocks),
        _life_of(request),
        not (isinstance(options, Mapping) and options.get("mode") == "explicit"),
    )


#: (text, marker's life or None, fixed number of tokens or None)
_Part = tuple[str, str | None, int | None]


def _sections(operation: Operation, request: Mapping[str, Any]) -> Iterator[tuple[str, str, list[_Part]]]:
    """(kind, role, parts) of tools, system prompt and each message."""
    tools = request.get("tools") or []
    if tools:
        yield "tools", "tools", [_part(tool) for tool in tools]
    if operation is Operation.MESSAGES:
        if request.get("system"):
            yield "system", "system", _parts(request["system"])
        messages = request["messages"]
    elif operation is Operation.RESPONSES:
        if request.get("instructions"):
            yield "system", "system", _parts(request["instructions"])
        messages = request["input"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
    else:
        messages = request["messages"]
    for message in messages:
        parts = _message_parts(message)
        life = _life_of(message)
        if life is not None and parts:
            parts[-1] = (parts[-1][0], life, parts[-1][2])
        yield "message", str(message.get("role") or message.get("type")), parts


def _message_parts(message: Mapping[str, Any]) -> list[_Part]:
    if message.get("role") is None and message.get("type") not in (None, "message"):
        # an item of a responses input: all it says but its own id
        item = {k: v for k, v in message.items() if k not in ("id", "status")}
        output = message.get("output")
        if not (isinstance(output, list) and len(output) == 1 and "text" in output[0]):
            return [_part(item)]
        # one block of text, which is the string with a place for a marker
        text, _, size = _part({**item, "output": output[0]["text"]})
        return [(text, _life_of(output[0]), size)]
    parts = _parts(message.get("content"))
    if isinstance(message.get("reasoning_content"), str):
        parts.insert(0, (message["reasoning_content"], None, None))
    for call in message.get("tool_calls") or []:
        parts.append(_part(call))
    return parts


def _parts(content: object) -> list[_Part]:
    if content is None:
        return []
    if isinstance(content, list):
        return [_part(part) for part in content]
    return [(str(content), None, None)]


def _part(part: object) -> _Part:
    if not isinstance(part, Mapping):
        return str(part), None, None
    life = _life_of(part)
    if isinstance(part.get("text"), str):
        return part["text"], life, None
    text = _compact({k: v for k, v in part.items() if k not in MARKERS})
    media = any(word in str(part.get("type")) for word in _MEDIA) and "function" not in part
    return text, life, MEDIA_TOKENS if media else None


def _life_of(holder: Mapping[str, Any]) -> str | None:
    """The life that a marker on this object asks for, "" = the default one; None if there is no marker."""
    for name in MARKERS:
        marker = holder.get(name)
        if isinstance(marker, Mapping):
            return str(marker.get("ttl") or "")
    return None


def _compact(value: object) -> str:
    return msgspec.json.encode(value).decode()


# --- the best possible ------------------------------------------------------------------------------------------


def best_usages(prompts: Sequence[Prompt], count: Count = count_by_size) -> list[Usage]:
    """The least that a run could be billed for: every token shared with an earlier step read, every new one written
    once, without a provider's limits. A line counts as shared wherever it stands.
    """
    blocks_seen: set[str] = set()
    lines_seen: set[str] = set()
    usages = []
    for prompt in prompts:
        new = before = 0
        for block in prompt.blocks:
            size, before = block.tokens - before, block.tokens
            if block.text in blocks_seen:
                continue
            lines = block.text.splitlines()
            fresh = [line for line in lines if line not in lines_seen]
            new += size if len(fresh) == len(lines) else min(size, sum(count(line) for line in fresh))
        for block in prompt.blocks:
            if block.text not in blocks_seen:
                blocks_seen.add(block.text)
                lines_seen.update(block.text.splitlines())
        usages.append(Usage(cache_read=prompt.tokens - new, cache_write_5m=new))
    return usages
