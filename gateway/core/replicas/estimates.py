"""Tokens without a tokenizer: learned from what answers report.

Bytes per token are learned for the whole deployment. Where a prompt extends one whose tokens were reported, only what
is new is estimated; where two prompts only share a beginning (a system prompt), its size is what the first answer
reported as cached there.

An engine keeps what it has generated, so the next prompt of a conversation reads the last answer from the cache as far
as its template renders it as it was made. How far that is belongs to the model, not to the answer: all of a text, as a
rule, but for the last token, which was never computed; nothing where a template drops reasoning or writes tool calls in
another form. So the few ways in which it can be are held against each report, text and tool calls apart, and the one
that was right most often lately is believed.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

from gateway.core.generations import Generations
from gateway.core.replicas.terms import Ask, Placed

_FIRST_GUESS = 4.0
#: Prompts outside of this are mostly images, or nonsense.
_LEAST, _MOST = 0.5, 32.0
_DECAY = 0.99
_FIRST_WEIGHT_TOKENS = 200.0
_SIZES = 16_384
#: A size learned for a shared beginning must be this close to what its bytes say.
_PLAUSIBLE = 0.5
#: How an answer is found in the next prompt: (all of it or nothing, tokens more or less). The first is believed
#: before anything is known: an engine does not compute the last token that it generates.
_REREADS = tuple((whole, more) for whole in (True, False) for more in (-1, 0, -2, -3, -4, 1))
_REREAD_RATE = 0.05
DEFAULT_BLOCK_TOKENS = 16


def thread_id(thread: str) -> int:
    """The same in every process."""
    return int(xxhash.xxh3_64_intdigest(thread.encode()))


class Estimates:
    def __init__(self, block_bytes: int, threads_max: int) -> None:
        self._block_bytes = block_bytes
        self._threads_max = threads_max
        self._chars = _FIRST_GUESS * _FIRST_WEIGHT_TOKENS
        self._tokens = _FIRST_WEIGHT_TOKENS
        self._threads: OrderedDict[int, Placed] = OrderedDict()
        self._sizes: Generations[int, int] = Generations(_SIZES)
        #: how often each of `_REREADS` was right lately; of answers in text, and of those that call tools
        self._right = tuple([0.5] + [0.0] * (len(_REREADS) - 1) for _ in range(2))
        self._reread = [0, 0]  # the best of each

    @property
    def chars_per_token(self) -> float:
        return self._chars / self._tokens

    @property
    def threads(self) -> OrderedDict[int, Placed]:
        return self._threads

    def place(self, placed: Placed) -> None:
        """Remember a thread's last prompt."""
        self._threads[placed.thread] = placed
        self._threads.move_to_end(placed.thread)
        if len(self._threads) > self._threads_max:
            self._threads.popitem(last=False)

    def knows(self, thread: str) -> bool:
        """A request of this thread has been here; also of one without a name, of which nothing can be told."""
        return not thread or thread_id(thread) in self._threads

    def before(self, ask: Ask) -> Placed | None:
        """The prompt that this one extends, if it is its thread's last one."""
        past = self._threads.get(thread_id(ask.thread)) if ask.thread else None
        if past is None or not 0 < past.blocks <= len(ask.chain.links):
            return None
        return past if ask.chain.links[past.blocks - 1] == past.link else None

    def prompt_tokens(self, ask: Ask, past: Placed | None) -> int:
        if past is not None and past.tokens:
            more = int((ask.prompt_chars - past.chars) / self.chars_per_token)
            return max(1, past.tokens + more, self._reread_tokens(past) + 1)
        return max(1, int(ask.prompt_chars / self.chars_per_token))

    def cached_tokens(
        self, ask: Ask, past: Placed | None, prompt_tokens: int, blocks: int, block_tokens: int
    ) -> int:
        """What a replica that holds the first `blocks` of a prompt will report as read from its cache.

        Whole blocks of `block_tokens`, and never the last token: an engine has to compute something.
        """
        if not blocks:
            return 0
        if past is not None and past.tokens and blocks >= past.blocks:
            found = self._reread_tokens(past)
        elif size := self._sizes.get(ask.chain.links[blocks - 1]):
            found = size
        elif past is not None and past.tokens:
            found = past.tokens * blocks * self._block_bytes // max(1, past.chars)
        else:
            found = int(blocks * self._block_bytes / self.chars_per_token)
        return min(found, prompt_tokens - 1) // block_tokens * block_tokens

    def _reread_tokens(self, past: Placed) -> int:
        """Up to where the next prompt is what the engine has from the last one and its answer, as far as is known."""
        whole, more = _REREADS[self._reread[past.calls]]
        return past.tokens + (past.output_tokens + more if whole and past.output_tokens else min(0, more))

    def _learn_reread(self, past: Placed, cached_tokens: int, block_tokens: int) -> None:
        """`cached_tokens` were read of a prompt that goes on where the last one and its answer end."""
        right = self._right[past.calls]
        blocks = cached_tokens // block_tokens
        first = (past.tokens + past.output_tokens - 1) // block_tokens
        if first == past.tokens // block_tokens == blocks:
            return  # the answer ends in the block in which the prompt did: that tells nothing
        for n, (whole, more) in enumerate(_REREADS):
            end = past.tokens + more + (past.output_tokens if whole else 0)
            right[n] += _REREAD_RATE * ((end // block_tokens == blocks) - right[n])
        self._reread[past.calls] = right.index(max(right))

    def learn(
        self,
        ask: Ask,
        past: Placed | None,
        blocks: int,
        prompt_tokens: int,
        cached_tokens: int | None,
        block_tokens: int,
    ) -> None:
        """An answer has reported its prompt's tokens; `blocks` were taken to be cached."""
        chars, links = ask.prompt_chars, ask.chain.links
        if prompt_tokens and _LEAST <= chars / prompt_tokens <= _MOST:
            self._chars = self._chars * _DECAY + chars
            self._tokens = self._tokens * _DECAY + prompt_tokens
        if links:
            self._sizes.put(links[-1], prompt_tokens)
        if not cached_tokens or not blocks:
            return
        if past is not None and past.tokens and blocks >= past.blocks:
            if past.output_tokens:
                self._learn_reread(past, cached_tokens, block_tokens)
        elif blocks < len(links):
            expected = blocks * self._block_bytes * prompt_tokens / chars
            if abs(cached_tokens - expected) <= _PLAUSIBLE * expected:
                self._sizes.put(links[blocks - 1], cached_tokens)
