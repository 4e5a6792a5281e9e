"""A request as the demo provider understands it: the prompt in parts, whatever dialect it came in.

The readers in `read.py` build these values; `cache.py` decides what is cached of them and `answers.py` what the
model says. Parts are in the order in which they are rendered: tools, system, messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from gateway.core.catalog import Operation
from gateway.demo.models import DemoModel

#: Template tokens: in front of every message, and after the last one (never cached: behind every breakpoint).
MESSAGE_TOKENS = 3
PRIMING_TOKENS = 3
#: An image counts the same whatever its size: OpenAI's formula for 1024 x 1024 (85 + 4 tiles of 170), or low detail.
IMAGE_TOKENS = 765
LOW_IMAGE_TOKENS = 85
#: A PDF, a recording or any other file.
FILE_TOKENS = 1_500


class BadRequest(Exception):
    """The request is refused with 400; `param` names the field if one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Section(IntEnum):
    TOOLS = 0
    SYSTEM = 1
    MESSAGES = 2


class Kind(StrEnum):
    TEXT = "text"
    MEDIA = "media"
    THINKING = "thinking"
    TOOL = "tool"  # a definition
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"


class Ttl(StrEnum):
    """Life of an Anthropic cache_control marker."""

    SHORT = "5m"
    LONG = "1h"


@dataclass(frozen=True, slots=True)
class Part:
    """One content block. `text` is what is rendered (of media: its source, which only counts as `tokens`)."""

    section: Section
    message: int  # parts with the same number are one message; tools and system count as messages too
    role: str
    kind: Kind
    text: str
    tokens: int | None = None  # fixed size instead of the tokenizer's count
    marker: Ttl | None = None  # cache_control
    openai_marker: bool = False  # prompt_cache_breakpoint


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for generation."""

    operation: Operation
    model: DemoModel
    model_name: str  # as the caller wrote it
    parts: tuple[Part, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"  # auto | none | required | a tool's name
    stream: bool = False
    include_usage: bool = False  # chat: a last chunk with usage
    max_output: int | None = None
    n: int = 1
    schema: Mapping[str, Any] | None = None  # the answer must be JSON of this schema
    cache_key: str = ""  # OpenAI prompt_cache_key
    implicit_breakpoint: bool = True  # OpenAI prompt_cache_options.mode is not "explicit"
    automatic: Ttl | None = None  # Anthropic top-level cache_control
    #: Settings that end the reuse of a cached prefix: all of it, from the system on, from the messages on.
    root_settings: str = ""
    system_settings: str = ""
    message_settings: str = ""

    @property
    def tool_results(self) -> int:
        return sum(1 for part in self.parts if part.kind is Kind.TOOL_RESULT)

    @property
    def has_media(self) -> bool:
        return any(part.kind is Kind.MEDIA for part in self.parts)

    def instructions(self) -> list[str]:
        """Texts in which a person or a system prompt may ask for something: not tool results, not answers."""
        return [p.text for p in self.parts if p.kind is Kind.TEXT and p.role != "assistant"]
