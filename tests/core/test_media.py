"""What messages hold beside text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects import media
from gateway.core.dialects.media import Media

CHAT, RESPONSES, MESSAGES = Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES
PIXELS = "iVBORw0KGgo" * 40
DATA_URL = f"data:image/png;base64,{PIXELS}"


def found(operation: Operation, *messages: Any) -> Media:
    body: dict[str, Any] = {"model": "m", "max_tokens": 10}
    body["input" if operation is RESPONSES else "messages"] = messages
    return media.of(dialects.read(operation, json.dumps(body).encode()))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("operation", "message", "expected"),
    [
        (CHAT, user({"type": "text", "text": "hello"}), Media()),
        (CHAT, user({"type": "image_url", "image_url": {"url": DATA_URL}}), Media(1, 0, len(DATA_URL))),
        (CHAT, user({"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}), Media(1, 1)),
        (CHAT, user({"image_url": DATA_URL}), Media(1, 0, len(DATA_URL))),  # vLLM takes it
        (CHAT, user({"type": "input_audio", "input_audio": {"data": "x"}}), Media(opaque=True)),
        (CHAT, user({"type": "file", "file": {"file_data": DATA_URL}}), Media(opaque=True)),
        (CHAT, {"role": "assistant", "audio": {"id": "audio_1"}}, Media(opaque=True)),
        (RESPONSES, user({"type": "input_image", "image_url": DATA_URL}), Media(1, 0, len(DATA_URL))),
        (RESPONSES, user({"type": "input_image", "file_id": "file_1"}), Media(1, 1)),
        (RESPONSES, user({"type": "input_file", "file_id": "file_1"}), Media(opaque=True)),
        (RESPONSES, {"type": "item_reference", "id": "rs_1"}, Media(opaque=True)),
        (
            RESPONSES,
            {"type": "function_call_output", "output": [{"type": "input_image", "image_url": DATA_URL}]},
            Media(1, 0, len(DATA_URL)),
        ),
        (
            RESPONSES,
            {
                "type": "computer_call_output",
                "output": {"type": "computer_screenshot", "image_url": DATA_URL},
            },
            Media(1, 0, len(DATA_URL)),
        ),
        (
            MESSAGES,
            user({"type": "image", "source": {"type": "base64", "data": PIXELS}}),
            Media(1, 0, len(PIXELS)),
        ),
        (
            MESSAGES,
            user(
                {
                    "type": "tool_result",
                    "content": [{"type": "image", "source": {"type": "base64", "data": PIXELS}}] * 2,
                }
            ),
            Media(2, 0, 2 * len(PIXELS)),
        ),
        (
            MESSAGES,
            user({"type": "image", "source": {"type": "url", "url": "https://x.example"}}),
            Media(1, 1),
        ),
        (MESSAGES, user({"type": "document", "source": {"type": "text", "data": "plain"}}), Media()),
        (
            MESSAGES,
            user({"type": "document", "source": {"type": "base64", "data": PIXELS}}),
            Media(opaque=True),
        ),
        # the arguments of a call are text, whatever they look like
        (
            MESSAGES,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "input": {"type": "file", "image_url": "x"}}],
            },
            Media(),
        ),
    ],
)
def test_images_are_counted_and_what_nothing_bounds_is_seen(
    operation: Operation, message: Any, expected: Media
) -> None:
    assert found(operation, user({"type": "text", "text": "first"}), message) == expected


def test_an_escaped_letter_hides_nothing() -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":[{"type":"im\u0061ge_url","im\u0061ge_url":"https://x"}]}]}'
    assert media.of(dialects.read(CHAT, body)) == Media(1, 1)


def test_words_about_images_are_no_images() -> None:
    quoted = json.dumps({"type": "image_url", "image_url": DATA_URL})
    assert found(CHAT, user({"type": "text", "text": quoted})) == Media()
