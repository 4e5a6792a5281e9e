"""What a request says, as values: read once from its bytes, never written back except through `Edits`.

msgspec Structs where a request makes many or large ones: a frozen dataclass costs seven times as much to build.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import sub
from typing import overload

import msgspec

from gateway.core.catalog import Operation
from gateway.core.dialects.json_slices import Span

#: (start, end, replacement): offsets in the body as received
Splice = tuple[int, int, bytes]


_EMPTY = memoryview(b"")


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One cacheable piece of the prompt. Segments come in prompt order: tools, then system, then messages."""

    kind: str  # "tools" | "system" | "message"
    raw: memoryview  # its bytes as received, a view on the body
    key: int = 0  # a hash of `raw`, seeded per process: for memories of this process only; 0 = not computed


class Segments(Sequence[Segment]):
    """The segments of a request. Those of its messages are made when they are asked for: few are looked at."""

    __slots__ = ("_body", "_head", "_made", "_messages", "head_keys", "keys", "marks", "nodes", "offsets")

    def __init__(
        self,
        head: Sequence[Segment] = (),
        messages: Sequence[msgspec.Raw] = (),
        keys: list[int] | None = None,
        marks: Sequence[int | None] = (),
        nodes: int = 0,
    ) -> None:
        self._head = tuple(head)
        self._messages = messages
        self._made: dict[int, Segment] = {}  # those of messages that somebody has asked for
        self._body = _EMPTY
        #: where the messages stand, if that is known
        self.offsets: Offsets | None = None
        self.head_keys = [segment.key for segment in head] if head else []
        #: `Segment.key` of each segment, in order
        self.keys: list[int] = self.head_keys + (keys or [])
        #: what the dialect's check remembered about each message (`request.prompt`)
        self.marks = marks
        #: arrays and objects in the whole body, as far as they had to be counted
        self.nodes = nodes

    def extending(self, body: bytes, offsets: Offsets, keys: list[int], nodes: int) -> Segments:
        """These segments read from a body without its first messages, put behind those: as read from `body`.

        `offsets` are of all messages in `body`; `keys` and `nodes` of all, in the place of those here.
        """
        whole = Segments(self._head)
        whole._body, whole.offsets = memoryview(body), offsets
        whole.keys = self.head_keys + keys
        whole.marks, whole.nodes = self.marks, nodes
        return whole

    @property
    def messages(self) -> Sequence[msgspec.Raw]:
        """As decoded; empty if they were not, because all but the last were known."""
        return self._messages

    def sizes(self) -> list[int]:
        """Bytes of each segment."""
        of_head = [len(segment.raw) for segment in self._head]
        if self.offsets is None:
            return of_head + [len(memoryview(message)) for message in self._messages]
        return of_head + list(map(sub, self.offsets.ends, self.offsets.starts))

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Segment]:
        yield from self._head
        for index in range(len(self._head), len(self.keys)):
            yield self._message(index)

    @overload
    def __getitem__(self, at: int) -> Segment: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Segment]: ...

    def __getitem__(self, at: int | slice) -> Segment | Sequence[Segment]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        made = self._made.get(at)
        if made is not None:
            return made
        index = range(len(self.keys))[at]
        return self._head[index] if index < len(self._head) else self._message(index)

    def _message(self, index: int) -> Segment:
        made = self._made.get(index)
        if made is None:
            n = index - len(self._head)
            raw = (
                memoryview(self._messages[n])
                if self.offsets is None or self._messages
                else self._body[self.offsets.span(n)]
            )
            made = self._made[index] = Segment("message", raw, self.keys[index])
        return made


class Offsets(msgspec.Struct, frozen=True):
    """Where each message of a body begins and ends, in bytes."""

    starts: array[int]
    ends: array[int]

    def span(self, n: int) -> slice:
        return slice(self.starts[n], self.ends[n])


class Spans(msgspec.Struct, frozen=True):
    """Where edits go, as offsets in the body."""

    #: value of each top-level member, by decoded name
    members: Mapping[str, Span]
    #: value of stream_options.include_usage, if stream_options is an object that has it
    include_usage: Span | None = None


class Facts(msgspec.Struct, frozen=True):
    """What a request asks for. `null` counts as absent everywhere."""

    operation: Operation
    model: str
    stream: bool
    include_usage: bool  # chat: the client itself asked for stream_options.include_usage
    #: the client's own bound on output tokens, the smallest if it names several; None if it names none.
    #: 0 only from messages (a request that only warms the cache)
    max_output_tokens: int | None
    n: int  # completions asked for
    tool_count: int
    message_count: int
    #: role of the last message; "tool" also for a messages-dialect user turn of tool results only; for
    #: responses the last item's role, else its type; "" for embeddings
    last_role: str
    has_images: bool  # or other media, or what looks like it: `media.of` looks closer
    long_cache_write: bool  # a marker or setting asks for a cache life of an hour or more
    reasoning: bool
    reasoning_effort: str  # "" if not named
    service_tier: str  # "" if not named
    #: strings that may name the session: user_id (metadata.user_id of the messages dialect), prompt_cache_key,
    #: session_id, conversation, previous_response_id, metadata.session_id, metadata.task_id, user.
    #: Client-controlled; longer than 512 characters are left out
    session_hints: Mapping[str, str]
    segments: Segments
    size: int  # bytes of the body
    spans: Spans
    #: a hash of the whole body, seeded per process; b"" until `dialects.read` has filled it in
    digest: bytes = b""
    thinking_budget: int = 0  # tokens that are for thinking alone (messages); 0 if none are named


class Edits(msgspec.Struct, frozen=True):
    """The declared changes to a body; every other byte stays as received."""

    model: str | None = None
    include_usage: bool = False  # chat streams: ask for the usage chunk; ignored elsewhere
    max_output_tokens: int | None = None
    #: what shaping changes (`core.shaping`): replacements that do not overlap, and members to insert, each with the
    #: comma before it
    splices: tuple[Splice, ...] = ()
    members: bytes = b""
