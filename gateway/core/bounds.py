"""How many tokens a request can cost at most, how many it probably costs, and when to try again.

A bound is a promise (a hard budget holds it); an estimate is a guess (routing, rate limits, cut streams).
"""

from __future__ import annotations

#: Byte-level tokenizers emit no token shorter than one byte of text, and JSON never encodes a text in fewer
#: bytes than its UTF-8, so the body's size bounds its text. What providers add around the text comes on top:
LEAST_TOKENS = 64  # start of prompt, answer primer, response-format wrapper
_MESSAGE_TOKENS = 16  # role markers and separators (3-4 at OpenAI, below 10 in published chat templates)
_TOOL_TOKENS = 64  # wrapper of one rendered function; its schema's text is in the body
#: A hidden system prompt appears with the first tool (Anthropic's tool-use table: up to about 800 tokens,
#: depending on model and tool_choice; docs as of 2026), whatever the number of tools.
_TOOL_PROMPT_TOKENS = 1_024
_BYTES_PER_TOKEN = 4  # English and code, 3.5-4.5 with current tokenizers

_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 8.0
_MAX_RETRY_AFTER_S = 30.0


def input_bound_tokens(size_bytes: int, messages: int, tools: int) -> int:
    """The most input tokens that a body of `size_bytes` of text can be billed as."""
    tool_prompt = _TOOL_PROMPT_TOKENS if tools else 0
    parts = messages * _MESSAGE_TOKENS + tools * _TOOL_TOKENS
    return size_bytes + LEAST_TOKENS + tool_prompt + parts


def added_bound_tokens(size_bytes: int, messages: int) -> int:
    """The most tokens by which `size_bytes` more in `messages` more make a known prompt longer. Its settings and
    tools are the same."""
    return size_bytes + LEAST_TOKENS + messages * _MESSAGE_TOKENS


def estimate_input_tokens(size_bytes: int) -> int:
    """A guess from the size of a body, without a tokenizer."""
    return -(-size_bytes // _BYTES_PER_TOKEN)


def estimate_output_tokens(output_bytes: int, output_events: int) -> int:
    """What a provider generated when it did not say: `output_bytes` of text in `output_events` stream events.

    The larger of the text's estimate and one token per event: providers that stream send at least a token with
    each content event, and scripts with many tokens per character defeat the bytes.
    """
    return max(-(-output_bytes // _BYTES_PER_TOKEN), output_events)


def retry_delay_s(attempt_no: int, retry_after_s: float | None, rand: float) -> float | None:
    """Seconds to wait after attempt `attempt_no` (1 = the first) failed; None = do not wait here, fail over.

    Full jitter between 0.25 s and a ceiling that doubles from 0.5 s to 8 s. A Retry-After of up to 30 s is
    waited for in full, plus up to 0.25 s so that those who were refused together do not return together.
    `rand` is in [0, 1).
    """
    if retry_after_s is not None:
        if retry_after_s > _MAX_RETRY_AFTER_S:
            return None
        return max(0.0, retry_after_s) + rand * _FIRST_DELAY_S
    # min() on the exponent too: 2.0 ** 1024 overflows
    ceiling_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(attempt_no, 10))
    return _FIRST_DELAY_S + rand * (ceiling_s - _FIRST_DELAY_S)
