"""Opens what sends calls to providers: a client of our own, and litellm for those that need it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from gateway.core.catalog import Catalog
from gateway.upstream.http import HttpUpstream, Upstreams


async def open_upstreams(
    catalog: Catalog, credentials: Mapping[str, str], stack: AsyncExitStack
) -> tuple[Upstreams, HttpUpstream]:
    """All of it, and the part that speaks HTTP. `credentials` may change later on; `stack` closes."""
    http = HttpUpstream(credentials)
    await http.start()
    stack.push_async_callback(http.stop)
    bridge = None
    if catalog.needs_litellm:
        # 3.5 s of CPU and 195 MB: imported here, once, and only for those who configured it.
        from gateway.upstream.litellm import LitellmUpstream

        bridge = LitellmUpstream(credentials)
        await bridge.start()
        stack.push_async_callback(bridge.stop)
    return Upstreams(http, bridge, credentials), http
