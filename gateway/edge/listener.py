"""aiohttp's low-level server, without what it does again for each body that was read."""

from __future__ import annotations

from aiohttp import web


class _Connection(web.RequestHandler):
    __slots__ = ()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp comes here after every read of a body, and parses what a pause may have kept back. Most bodies were
        never held up."""
        if self._reading_paused:
            super().resume_reading(resume_parser)


class Listener(web.Server):
    """Makes one connection for each client that comes."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)
