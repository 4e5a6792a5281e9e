"""The API dialects: facts out of a request's bytes, edits spliced back in, usage out of an answer.

Requests are never rebuilt: a body leaves as it came, except for the declared `Edits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gateway.core.catalog import Operation
from gateway.core.dialects import anthropic_messages, embeddings, openai_chat, openai_responses
from gateway.core.dialects.answers import ABORT, AnswerFacts, EventFacts, Reading, aborted
from gateway.core.dialects.facts import Edits, Facts, Segment
from gateway.core.dialects.known import KnownBodies
from gateway.core.dialects.other_usage import read_bedrock_usage, read_gemini_usage
from gateway.core.dialects.splice import insert_cost, render

__all__ = [
    "ABORT",
    "AnswerFacts",
    "Edits",
    "EventFacts",
    "Facts",
    "Reading",
    "Segment",
    "aborted",
    "event_reader",
    "read",
    "read_answer",
    "read_bedrock_usage",
    "read_gemini_usage",
    "read_usage",
    "render",
    "with_cost",
]


_READERS: Mapping[Operation, Callable[[bytes], Facts]] = {
    Operation.CHAT: openai_chat.read,
    Operation.RESPONSES: openai_responses.read,
    Operation.MESSAGES: partial(anthropic_messages.read, Operation.MESSAGES),
    Operation.COUNT_TOKENS: partial(anthropic_messages.read, Operation.COUNT_TOKENS),
    Operation.EMBEDDINGS: embeddings.read,
}
_KNOWN = KnownBodies()


def read(operation: Operation, body: bytes) -> Facts:
    """The facts of a request body. Raises InvalidRequest with a message that names the field or the byte."""
    return _KNOWN.read(operation, body, _READERS[operation])


def read_answer(operation: Operation, body: bytes) -> AnswerFacts:
    """The facts of a complete answer with status 200. Raises UpstreamMalformed if it is no such answer."""
    match operation:
        case Operation.CHAT:
            return openai_chat.read_answer(body)
        case Operation.RESPONSES:
            return openai_responses.read_answer(body)
        case Operation.MESSAGES | Operation.COUNT_TOKENS:
            return anthropic_messages.read_answer(operation, body)
        case Operation.EMBEDDINGS:
            return embeddings.read_answer(body)


def event_reader(operation: Operation) -> Callable[[str, bytes], EventFacts | None]:
    """Reads (name, data) of one event of a stream; None if it is not JSON of this dialect."""
    match operation:
        case Operation.CHAT:
            return openai_chat.read_event
        case Operation.RESPONSES:
            return openai_responses.read_event
        case _:
            return anthropic_messages.read_event


def read_usage(operation: Operation, usage: object, service_tier: str = "") -> Reading:
    """A decoded usage object of that dialect; never raises, whatever `usage` is."""
    match operation:
        case Operation.CHAT:
            return openai_chat.read_usage(usage, service_tier)
        case Operation.RESPONSES:
            return openai_responses.read_usage(usage, service_tier)
        case Operation.EMBEDDINGS:
            return embeddings.read_usage(usage)
        case _:
            return anthropic_messages.read_usage(usage)


def with_cost(operation: Operation, body: bytes, cost_usd_text: str) -> bytes:
    """The answer with `"cost":<cost_usd_text>` (a JSON number) in its usage object, else byte-identical.

    A cost that the provider reports is replaced. Unchanged if there is no usage object; counting tokens is free.
    """
    if operation is Operation.COUNT_TOKENS:
        return body
    return insert_cost(body, ("usage",), cost_usd_text)
