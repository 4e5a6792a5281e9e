"""What is in a message beside text: images, whose tokens their bytes do not bound, and what nothing bounds.

Only requests in which `suspect` finds something are looked at.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.core.dialects.facts import Facts
from gateway.core.generations import Generations

#: Content parts of the dialects as documented in 2026-11: OpenAI chat and responses, Anthropic messages, and vLLM's.
_TYPES = re.compile(
    rb'"type"\s*:\s*"(?:image|image_url|input_image|computer_screenshot|document|file|input_file|audio|input_audio|'
    rb'audio_url|video|video_url|input_video|container_upload|item_reference|image_pil|image_embeds)"'
)
#: An escaped letter could hide any of them.
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
#: Tools that a provider runs by itself, and whose results it adds to the input that it bills (2026-11).
_SERVED = re.compile(
    rb'"type"\s*:\s*"(?:web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|'
    rb'tool_search|advisor|x_search|google_search|live_search)[^"]*"'
)
#: The same as members of a request: OpenAI's search models, OpenRouter, Anthropic, xAI (2026-11).
_SERVED_MEMBERS = frozenset({"web_search_options", "plugins", "mcp_servers", "search_parameters"})
_IMAGES = frozenset({"image", "image_url", "input_image", "computer_screenshot"})
#: A page or a second of these weighs what only the provider knows; a reference stands for text that is not here.
_OPAQUE = frozenset(
    {
        *("file", "input_file", "audio", "input_audio", "audio_url", "video", "video_url", "input_video"),
        *("container_upload", "item_reference", "image_pil", "image_embeds"),
    }
)
_NAMED_BY_KEY = ("image_url", "audio_url", "video_url", "input_audio")


class Media(msgspec.Struct, frozen=True, gc=False):
    """`images` in all, `remote` of them by an address behind which there may be another one next time; the bytes of
    those that are in the text; and whether there is something that nothing bounds."""

    images: int = 0
    remote: int = 0
    image_bytes: int = 0
    opaque: bool = False

    def __add__(self, other: Media) -> Media:
        return Media(
            self.images + other.images,
            self.remote + other.remote,
            self.image_bytes + other.image_bytes,
            self.opaque or other.opaque,
        )


NONE = Media()


def suspect(text: bytes) -> bool:
    """Whether a message may hold anything beside text. Each of these searches is one fast pass."""
    return (
        _TYPES.search(text) is not None
        or b'_url"' in text  # parts without a type, which vLLM takes
        or b'audio"' in text
        or _ESCAPED_LETTER.search(text) is not None
    )


def weigh(text: bytes | memoryview) -> Media:
    """What a message (valid JSON, of bounded depth) holds beside text."""
    message = msgspec.json.decode(text)
    found = _part(message)
    if isinstance(message, dict) and message.get("audio"):
        found += Media(opaque=True)  # chat: an earlier answer in speech, by its id
    return found


def _part(part: Any) -> Media:
    """A message, an item, or a content part; arguments of calls are text, whatever they look like."""
    if isinstance(part, list):
        found = NONE
        for each in part:
            found += _part(each)
        return found
    if not isinstance(part, dict):
        return NONE
    kind = part.get("type") or next((name for name in _NAMED_BY_KEY if part.get(name)), "")
    if kind in _IMAGES:
        return _image(part)
    if kind in _OPAQUE:
        return Media(opaque=True)
    if kind == "document":
        source = part.get("source")
        if not isinstance(source, dict) or source.get("type") not in ("text", "content"):
            return Media(opaque=True)
        return _part(source.get("content"))
    return _part(part.get("content")) + _part(part.get("output"))


def _image(part: dict[str, Any]) -> Media:
    source = part.get("source")
    if isinstance(source, dict):
        content = source.get("data")
        if source.get("type") == "base64" and isinstance(content, str):
            return Media(1, 0, len(content))
        return Media(1, 1)
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if isinstance(url, str) and url.startswith("data:"):
        return Media(1, 0, len(url))
    return Media(1, 1)


#: What `weigh` said, by the key of the segment.
_WEIGHED: Generations[int, Media] = Generations(8_192)


def _weighed(key: int, message: memoryview) -> Media:
    if not key:
        return weigh(message)
    media = _WEIGHED.get(key)
    if media is None:
        media = weigh(message)
        _WEIGHED.put(key, media)
    return media


def of(facts: Facts) -> Media:
    """What the messages of a request hold beside text. Each message is looked at once."""
    if not facts.has_images:
        return NONE
    found = NONE
    for segment in facts.segments:
        if segment.kind == "message":
            seen = _weighed(segment.key, segment.raw)
            if seen is not NONE:
                found += seen
    return found


def server_tools(facts: Facts) -> bool:
    """Whether a request offers tools that the provider runs by itself: what it bills then has no bound in the request."""
    if not _SERVED_MEMBERS.isdisjoint(facts.spans.members):
        return True
    segments = facts.segments
    if not facts.tool_count or segments[0].kind != "tools":
        return False
    key = segments.keys[0]
    known = _SERVED_SEEN.get(key)
    if known is None:
        known = _SERVED.search(segments[0].raw) is not None
        if len(_SERVED_SEEN) >= _TOOLS_MAX:
            _SERVED_SEEN.clear()
        _SERVED_SEEN[key] = known
    return known


_TOOLS_MAX = 4_096
_SERVED_SEEN: dict[int, bool] = {}
