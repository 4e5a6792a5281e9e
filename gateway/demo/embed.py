"""Embeddings of the demo provider: unit vectors drawn from the text's hash."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Mapping
from typing import Any

from gateway.demo.prompt import BadRequest
from gateway.demo.tokens import TokenCounts

DEFAULT_DIMENSIONS = 256
MAX_DIMENSIONS = 3_072


def embedding_tokens(body: Mapping[str, Any], counts: TokenCounts) -> list[int]:
    """Tokens of each input; a list of token numbers counts as it is. Raises BadRequest."""
    return [len(item) if isinstance(item, list) else counts.measure(item)[1] for item in _inputs(body)]


def embedding_body(
    body: Mapping[str, Any], model_name: str, usage: Mapping[str, Any] | None
) -> dict[str, Any]:
    dimensions = body.get("dimensions") or DEFAULT_DIMENSIONS
    if type(dimensions) is not int or not 1 <= dimensions <= MAX_DIMENSIONS:
        raise BadRequest(f"dimensions must be an integer from 1 to {MAX_DIMENSIONS}", "dimensions")
    as_base64 = body.get("encoding_format") == "base64"
    rows = []
    for i, item in enumerate(_inputs(body)):
        packed = vector(str(item), dimensions)
        value = (
            base64.b64encode(packed).decode() if as_base64 else list(struct.unpack(f"<{dimensions}f", packed))
        )
        rows.append({"object": "embedding", "index": i, "embedding": value})
    answer: dict[str, Any] = {"object": "list", "data": rows, "model": model_name}
    return answer if usage is None else {**answer, "usage": usage}


def vector(text: str, dimensions: int) -> bytes:
    """Little-endian 32-bit floats of length one, so that both encodings carry the same numbers."""
    drawn = hashlib.shake_256(text.encode("utf-8", "surrogatepass")).digest(2 * dimensions)
    # Odd numbers: never all zero, so there is always a length to divide by.
    raw = [2 * n + 1 for n in struct.unpack(f"<{dimensions}h", drawn)]
    length = sum(x * x for x in raw) ** 0.5
    return struct.pack(f"<{dimensions}f", *(x / length for x in raw))


def _inputs(body: Mapping[str, Any]) -> list[str | list[int]]:
    given = body.get("input")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(item) is int for item in given):
            return [given]
        if all(isinstance(item, str | list) for item in given):
            return given
    raise BadRequest("input must be a text, a list of texts, or token numbers", "input")
