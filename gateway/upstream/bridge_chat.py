"""Chat completions as the hub dialect between a client and litellm. Pure.

Requests become keyword arguments for `litellm.acompletion`; litellm's answers become plain chat completions again,
without litellm's own fields and with one usage shape (OpenAI chat reference, 2026-11):

    prompt_tokens, completion_tokens, total_tokens
    prompt_tokens_details.cached_tokens          read from cache, inside prompt_tokens
    prompt_tokens_details.cache_write_tokens     written to cache, inside prompt_tokens
    completion_tokens_details.reasoning_tokens   inside completion_tokens

and, where the provider tells write classes apart, `prompt_tokens_details.cache_creation_token_details` with
Anthropic's names `ephemeral_5m_input_tokens` and `ephemeral_1h_input_tokens`, as litellm calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Reach the provider as they are, or through litellm's mapping of OpenAI parameters.
_MEANT = frozenset(
    {
        "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs",
        "max_completion_tokens", "max_tokens", "messages", "modalities", "n", "presence_penalty",
        "response_format", "stop", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_logprobs",
        "top_p", "web_search_options",
    }
)  # fmt: skip
#: Left out, and reported, where the provider has no counterpart: they steer service or style, not meaning.
_HINTS = frozenset(
    {
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning_effort", "safety_identifier", "seed", "service_tier", "store", "user",
        "verbosity",
    }
)  # fmt: skip
#: litellm gives these a meaning of its own, whatever the provider supports.
_LITELLM_OWN = frozenset({"metadata", "prompt_cache_options"})
#: Accepted by litellm for some providers although its list of OpenAI parameters does not name them.
_EXTENSIONS = frozenset({"messages", "top_k", "thinking"})
_HANDLED_ELSEWHERE = frozenset({"model", "stream", "stream_options"})


class Untranslatable(Exception):
    """The request asks for something that this provider cannot be asked for; `param` names it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Target:
    """What the provider behind litellm can take."""

    provider: str
    #: OpenAI parameter names that litellm maps for this model
    supported: frozenset[str]
    #: system turns inside the conversation stay where they are
    inner_system: bool
    #: thinking blocks of earlier turns are replayed with their signatures
    thinking_blocks: bool
    #: a tool message may hold images
    tool_images: bool
    #: cache markers inside the request are understood, or at least tolerated
    markers: bool
    #: an Anthropic model, wherever it is hosted: takes `thinking` as it is, and does not count reasoning tokens
    claude: bool


@dataclass(frozen=True, slots=True)
class Arguments:
    """Keyword arguments for litellm, and the names of the parameters that were left out."""

    kwargs: dict[str, Any]
    dropped: tuple[str, ...]


def arguments(body: Mapping[str, Any], target: Target) -> Arguments:
    """Only known parameters go through: litellm obeys dozens of others (`api_base`, `fallbacks`, `mock_response`).

    Raises `Untranslatable` for a parameter that the provider has no counterpart for, unless it is only a hint.
    """
    for name, kind in (("messages", list), ("tools", list | None)):
        if not isinstance(body.get(name), kind):
            raise Untranslatable(f"'{name}' must be an array", name)
    kwargs: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in body.items():
        if value is None or name in _HANDLED_ELSEWHERE:
            continue
        if name == "parallel_tool_calls" and value is True and not target.inner_system:
            continue  # the default everywhere; said aloud, litellm makes a tool_choice of it that nobody asked for
        if name not in _MEANT and name not in _HINTS:
            raise Untranslatable(f"'{name}' cannot be passed on to provider '{target.provider}'", name)
        if name not in _LITELLM_OWN and (name in target.supported or name in _EXTENSIONS):
            kwargs[name] = value
        elif name in _HINTS:
            dropped.append(name)
        elif name in ("max_completion_tokens", "max_tokens"):
            kwargs["max_tokens" if name == "max_completion_tokens" else "max_completion_tokens"] = value
        else:
            raise Untranslatable(f"provider '{target.provider}' has no counterpart for '{name}'", name)
    if isinstance(messages := kwargs.get("messages"), list) and not target.inner_system:
        kwargs["messages"] = keep_system_in_place(messages)
    if isinstance(messages := kwargs.get("messages"), list) and target.claude and target.markers:
        kwargs["messages"] = [mark_whole_result(message) for message in messages]
    if not target.markers:
        kwargs = {name: without_markers(value) for name, value in kwargs.items()}
    return Arguments(kwargs, tuple(dropped))


def without_markers(value: Any) -> Any:
    """The same without `cache_control`, except where it is a name inside a schema or an argument."""
    if isinstance(value, list):
        return [without_markers(v) for v in value]
    if isinstance(value, dict):
        return {
            k: v if k in ("function", "json_schema") else without_markers(v)
            for k, v in value.items()
            if k != "cache_control"
        }
    return value


def mark_whole_result(message: Any) -> Any:
    """A marker on the last part of a tool message, put on the message.

    litellm leaves it on the text inside of the `tool_result`, and Anthropic caches at top-level blocks only.
    """
    if not isinstance(message, dict) or message.get("role") != "tool" or "cache_control" in message:
        return message
    content = message.get("content")
    if not isinstance(content, list) or not content or not isinstance(content[-1], dict):
        return message
    marker = content[-1].get("cache_control")
    if marker is None:
        return message
    last = {k: v for k, v in content[-1].items() if k != "cache_control"}
    return {**message, "content": [*content[:-1], last], "cache_control": marker}


def keep_system_in_place(messages: list[Any]) -> list[Any]:
    """System turns after the first other turn become user turns, as Anthropic advises for older models.

    litellm would move them to the front, where each new one changes the prefix and empties the provider's cache.
    """
    out: list[Any] = []
    leading = True
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            leading = False
            out.append(message)
        elif leading:
            out.append(message)
        else:
            out.append({**message, "role": "user", "content": reminder(message.get("content"))})
    return out


def reminder(content: Any) -> Any:
    """System text (or text parts) marked as such for a user turn."""
    if isinstance(content, str):
        return f"<system-reminder>\n{content}\n</system-reminder>"
    if isinstance(content, list):
        return [
            {**part, "text": reminder(part["text"])} if isinstance(part, dict) and "text" in part else part
            for part in content
        ]
    return content


# --- answers -------------------------------------------------------------------------------------------

_FINISH = {
    "stop_sequence": "stop",
    "end_turn": "stop",
    "eos": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "guardrail_intervened": "content_filter",
    "content_filtered": "content_filter",
    "safety": "content_filter",
    "refusal": "content_filter",
}


def completion(dump: Mapping[str, Any], model: str, counts_reasoning: bool) -> dict[str, Any]:
    """A plain chat completion out of litellm's `ModelResponse.model_dump()`."""
    out: dict[str, Any] = {
        "id": dump.get("id") or "",
        "object": "chat.completion",
        "created": dump.get("created") or 0,
        "model": dump.get("model") or model,
        "choices": [_choice(c) for c in dump.get("choices") or ()],
    }
    for name in ("system_fingerprint", "service_tier"):
        if dump.get(name):
            out[name] = dump[name]
    if told := usage(dump.get("usage") or {}, counts_reasoning):
        out["usage"] = told
    return out


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    kept |= _kept(message, ("refusal", "reasoning_content", "thinking_blocks", "audio", "annotations"))
    if message.get("tool_calls"):
        kept["tool_calls"] = [_tool_call(t) for t in message["tool_calls"]]
    if message.get("function_call"):
        kept["function_call"] = message["function_call"]
    out = {
        "index": choice.get("index") or 0,
        "message": kept,
        "finish_reason": finish_reason(choice.get("finish_reason"), bool(message.get("tool_calls"))),
    }
    if choice.get("logprobs"):
        out["logprobs"] = choice["logprobs"]
    return out


def _kept(source: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {n: source[n] for n in names if source.get(n)}


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    out: dict[str, Any] = {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
    }
    return out


def finish_reason(reason: Any, called_tools: bool) -> str | None:
    """OpenAI's word for litellm's; Gemini and others say "stop" even when they call tools."""
    if not reason:
        return None
    word = str(reason).lower()
    word = _FINISH.get(word, word)
    return "tool_calls" if word == "stop" and called_tools else word


class ChunkReader:
    """litellm's stream chunks as plain chat completion chunks: one id, one model, one finish reason per choice.

    `usage` and `finished` tell after the last chunk what the provider reported; litellm's own stream wrapper
    would have estimated the first and invented the second.
    """

    def __init__(self, model: str, counts_reasoning: bool) -> None:
        self._model = model
        self._counts_reasoning = counts_reasoning
        self._id = ""
        self._created = 0
        self._called: set[int] = set()
        self._begun: set[int] = set()
        self._finish: dict[int, str] = {}
        self._extra: dict[str, Any] = {}
        self.usage: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return bool(self._finish)

    def read(self, dump: Mapping[str, Any]) -> dict[str, Any] | None:
        """The chunk to pass on, or None if it only told usage or an ending."""
        self._id = self._id or str(dump.get("id") or "")
        self._created = self._created or int(dump.get("created") or 0)
        self._model = str(dump.get("model") or self._model)
        for name in ("system_fingerprint", "service_tier"):
            if dump.get(name):
                self._extra[name] = dump[name]
        if told := usage(dump.get("usage") or {}, self._counts_reasoning):
            self.usage = _larger(self.usage, told)
        choices = [c for c in (self._read_choice(c) for c in dump.get("choices") or ()) if c]
        return self._chunk(choices) if choices else None

    def _read_choice(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        index = choice.get("index") or 0
        delta = choice.get("delta") or {}
        kept = _kept(
            delta, ("content", "refusal", "reasoning_content", "thinking_blocks", "audio", "annotations")
        )
        if calls := delta.get("tool_calls"):
            self._called.add(index)
            kept["tool_calls"] = [_tool_call_delta(t) for t in calls]
        if delta.get("function_call"):
            kept["function_call"] = delta["function_call"]
        if choice.get("finish_reason"):
            self._finish[index] = str(choice["finish_reason"])
        if not kept:
            return None
        if index not in self._begun:
            self._begun.add(index)
            kept = {"role": "assistant", **kept}
        out = {"index": index, "delta": kept, "finish_reason": None}
        if choice.get("logprobs"):
            out["logprobs"] = choice["logprobs"]
        return out

    def last(self) -> dict[str, Any]:
        """The chunk that ends every choice."""
        return self._chunk(
            [
                {"index": i, "delta": {}, "finish_reason": finish_reason(reason, i in self._called)}
                for i, reason in sorted(self._finish.items())
            ]
        )

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for, after all others."""
        return {**self._chunk([]), "usage": self.usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            **self._extra,
            "choices": choices,
        }


def generic_chunk(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """litellm's older chunk, `{text, tool_use, is_finished, finish_reason, usage, index}`, in the shape of a dump."""
    delta = {
        "content": chunk.get("text"),
        "tool_calls": [chunk["tool_use"]] if chunk.get("tool_use") else None,
    }
    finish = chunk.get("finish_reason") if chunk.get("is_finished") else None
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": chunk.get("usage")}


def _tool_call_delta(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    out: dict[str, Any] = {"index": call.get("index") or 0}
    if call.get("id"):
        out |= {"id": call["id"], "type": "function"}
    out["function"] = {n: function[n] for n in ("name", "arguments") if function.get(n) is not None}
    return out


def _larger(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Providers repeat a growing usage (Gemini) or split it over events (Anthropic): the larger total is the whole."""
    return new if old is None or new["total_tokens"] >= old["total_tokens"] else old


def usage(told: Mapping[str, Any], counts_reasoning: bool) -> dict[str, Any] | None:
    """One shape out of litellm's `Usage`, which already counts cached and written tokens inside prompt_tokens.

    None if the provider told none: litellm then says zero, which no request is.

    `counts_reasoning` False: the provider does not tell reasoning apart, so litellm's number is its own estimate.
    """
    details = told.get("prompt_tokens_details") or {}
    prompt = _count(told.get("prompt_tokens"))
    output = _count(told.get("completion_tokens"))
    if not prompt and not output:
        return None
    read = _count(details.get("cached_tokens"), told.get("cache_read_input_tokens"))
    written = _count(
        details.get("cache_creation_tokens"),
        details.get("cache_write_tokens"),
        told.get("cache_creation_input_tokens"),
    )
    out: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    out["prompt_tokens_details"] = {"cached_tokens": read}
    if written:
        out["prompt_tokens_details"]["cache_write_tokens"] = written
        if split := details.get("cache_creation_token_details"):
            out["prompt_tokens_details"]["cache_creation_token_details"] = {
                name: _count(split.get(name))
                for name in ("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens")
            }
    reasoning = _count((told.get("completion_tokens_details") or {}).get("reasoning_tokens"))
    if reasoning and counts_reasoning:
        out["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return out


def _count(*candidates: Any) -> int:
    """The first that is a positive number, else 0."""
    return next((c for c in candidates if isinstance(c, int) and c > 0), 0)
