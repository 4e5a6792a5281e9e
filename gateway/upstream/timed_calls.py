"""Calls that are made to be timed: straight to one replica, with the gateway's own credential, for nobody's account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from gateway.core.calibration import Timed
from gateway.ports import Unanswered

_DATA = b"data: "
_DONE = b"[DONE]"


class TimedCalls:
    """Chat completions of one model at one replica. `monotonic` is the clock."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        address: str,
        model: str,
        headers: Mapping[str, str],
        monotonic: Callable[[], float],
    ) -> None:
        self._http = http
        self._url = f"{address}/chat/completions"
        self._model = model
        self._headers = headers
        self._monotonic = monotonic

    async def ask(self, prompt: str, output_tokens: int) -> tuple[float, Timed]:
        """(the second in which it was sent, how it went). Raises `Unanswered`.

        `ignore_eos` is vLLM's and SGLang's: the answer is as long as it may be.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = self._monotonic()
        try:
            async with self._http.post(
                self._url, data=msgspec.json.encode(body), headers=self._headers, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    said = (await answer.content.read(2_000)).decode("utf-8", "replace")
                    raise Unanswered(f"HTTP {answer.status}: {' '.join(said.split())[:300]}")
                return sent_s, await self._read(answer, sent_s)
        except TimeoutError:
            raise Unanswered("no answer in time", slow=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(str(error) or type(error).__name__) from error

    async def _read(self, answer: aiohttp.ClientResponse, sent_s: float) -> Timed:
        first_s = last_s = 0.0
        usage: dict[str, Any] | None = None
        finish = ""
        async for line in answer.content:
            if not line.startswith(_DATA) or line[len(_DATA) :].strip() == _DONE:
                continue
            try:
                event = msgspec.json.decode(line[len(_DATA) :])
                choices, usage = event["choices"], event.get("usage") or usage
                finish = next((c.get("finish_reason") or finish for c in choices), finish)
            except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
                raise Unanswered("its stream is none of chat completions") from error
            if choices:
                last_s = self._monotonic() - sent_s
                first_s = first_s or last_s
        if finish == "abort":
            raise Unanswered("it is being shut down")
        if not first_s or usage is None:
            raise Unanswered("its stream ended without an answer or without usage")
        return _timed(usage, first_s, last_s)


def _timed(usage: Mapping[str, Any], first_s: float, last_s: float) -> Timed:
    try:
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Timed(
            int(usage["prompt_tokens"]),
            None if cached is None else int(cached),
            int(usage["completion_tokens"]),
            first_s,
            last_s,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unanswered("its usage cannot be read") from error
