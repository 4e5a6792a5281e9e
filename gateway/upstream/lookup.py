"""Ask a provider what a past request really used. For attempts whose answer was cut, lost or silent on usage.

Shape: OpenRouter's `GET /generation?id=` (`data.native_tokens_*`, its API reference, November 2026), which the demo
provider speaks too, with its cache classes beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import msgspec

from gateway.core.catalog import Provider
from gateway.core.dialects import Reading
from gateway.core.usage import Usage

TIMEOUT_S = 10.0


class UsageLookup:
    """`find` answers with the provider's own counts, or None if it does not know (yet)."""

    def __init__(self, credentials: Mapping[str, str]) -> None:
        self._credentials = credentials
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def find(self, provider: Provider, request_id: str) -> Reading | None:
        if self._session is None or not provider.usage_lookup or not request_id:
            return None
        secret = self._credentials.get(provider.credential, "")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        url = provider.base_url + provider.usage_lookup + request_id
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                return read_generation(await answer.read())
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None  # asked again later


def read_generation(body: bytes) -> Reading | None:
    """The usage of a generation record; None if it is not one. Cached tokens are inside the prompt's."""
    try:
        doc = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    data = doc.get("data") if isinstance(doc, dict) else None
    if not isinstance(data, dict):
        return None

    def count(name: str) -> int:
        value = data.get(name)
        return value if type(value) is int and value >= 0 else 0

    prompt, read = count("native_tokens_prompt"), count("native_tokens_cached")
    writes = count("cache_write_5m"), count("cache_write_1h")
    output, reasoning = count("native_tokens_completion"), count("native_tokens_reasoning")
    if prompt < read + sum(writes) or not isinstance(data.get("native_tokens_prompt"), int):
        return None
    try:
        usage = Usage(
            input_uncached=prompt - read - sum(writes),
            cache_read=read,
            cache_write_5m=writes[0],
            cache_write_1h=writes[1],
            output=output,
            reasoning=min(reasoning, output),
        )
    except ValueError:
        return None
    return Reading(usage)
