"""The demo provider's tokenizer: deterministic, lossless, and countable at several megabytes per second.

A token is the longest of, from left to right:
- up to 5 Latin letters, with one space before them if there is one;
- up to 3 digits, likewise;
- up to 8 white-space characters;
- up to 2 of any other characters.

Every token is at least one character, so a text never has more tokens than UTF-8 bytes: a bound on bytes is a
bound on tokens.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import xxhash

_PIECE = re.compile(r" ?[A-Za-z]{1,5}| ?[0-9]{1,3}|\s{1,8}|[^\sA-Za-z0-9]{1,2}")


def pieces(text: str) -> list[str]:
    """The tokens of `text`; joined they are the text again."""
    return _PIECE.findall(text)


class TokenCounts:
    """Token counts by the digest of the text, so that an agent's growing history is tokenized once.

    Holds at most `max_entries`; the least recently used go first.
    """

    def __init__(self, max_entries: int = 50_000) -> None:
        self._max_entries = max_entries
        self._by_digest: OrderedDict[bytes, int] = OrderedDict()

    def measure(self, text: str) -> tuple[bytes, int]:
        """(16-byte digest, number of tokens) of `text`."""
        digest = xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
        count = self._by_digest.get(digest)
        if count is None:
            count = self._by_digest[digest] = len(pieces(text))
            if len(self._by_digest) > self._max_entries:
                self._by_digest.popitem(last=False)
        else:
            self._by_digest.move_to_end(digest)
        return digest, count
