"""Opens what sends calls to providers: a client of our own, and litellm for those that need it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from gateway.core.catalog import Catalog
from gateway.core.errors import UpstreamError
from gateway.ports import UpstreamAnswer, UpstreamCall
from gateway.upstream.http import HttpUpstream, Upstreams

if TYPE_CHECKING:
    from gateway.upstream.litellm import LitellmUpstream


class Litellm:
    """`ports.Upstream` for what goes through litellm, which is imported when a catalog first needs it: 3.5 s of
    CPU in a thread of its own, during which requests are served more slowly, and 195 MB. Nobody else pays for it.

    `credentials` may change later on. `watch` makes the task that loads it, whose failure nobody need await.
    """

    def __init__(
        self,
        credentials: Mapping[str, str],
        watch: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._credentials = credentials
        self._watch = watch
        self._loading: asyncio.Task[None] | None = None
        self._loaded: LitellmUpstream | None = None

    def use(self, catalog: Catalog) -> None:
        """Begin to load it, if this needs it."""
        if catalog.needs_litellm:
            self.wanted()

    def wanted(self) -> asyncio.Task[None]:
        """Begin to load it, if nobody has; one that failed is tried again."""
        if self._loading is None or (self._loading.done() and self._loaded is None):
            self._loading = self._watch(self._load(), "litellm")
        return self._loading

    async def open(self, call: UpstreamCall) -> UpstreamAnswer:
        if self._loaded is None:
            await asyncio.wait([self.wanted()])  # a caller that leaves does not end the loading
        if self._loaded is None:
            raise UpstreamError("litellm could not be loaded; the log says why", billed=False)
        return await self._loaded.open(call)

    async def stop(self) -> None:
        if self._loaded is not None:
            await self._loaded.stop()

    async def _load(self) -> None:
        loaded = await asyncio.to_thread(_imported, self._credentials)
        await loaded.start()
        self._loaded = loaded


def _imported(credentials: Mapping[str, str]) -> LitellmUpstream:
    from gateway.upstream.litellm import LitellmUpstream

    made = LitellmUpstream(credentials)
    if gc.get_freeze_count():
        gc.freeze()  # as `start` does it: no collection looks at a library's objects again
    return made


async def open_upstreams(
    catalog: Catalog, credentials: Mapping[str, str], bridge: Litellm, stack: AsyncExitStack
) -> tuple[Upstreams, HttpUpstream]:
    """All of it, and the part that speaks HTTP. If the catalog needs the bridge, it is ready now. `credentials` may change
    later on; `stack` closes."""
    http = HttpUpstream(credentials)
    await http.start()
    stack.push_async_callback(http.stop)
    stack.push_async_callback(bridge.stop)
    if catalog.needs_litellm:
        await bridge.wanted()
    return Upstreams(http, bridge, credentials), http
