"""An OTLP/HTTP collector that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


class Collector:
    """`got` has path, headers and body of each post, decompressed by nobody; `status` is what it answers."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Mapping[str, str], bytes]] = []
        self.status = 200
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.got.append((self.path, dict(self.headers.items()), body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing on standard error."""

        self.server = HTTPServer(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def bodies(self, path: str) -> list[bytes]:
        return [body for at, _, body in self.got if at == path]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serves while this lasts."""
    it = Collector()
    thread = threading.Thread(target=it.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield it
    finally:
        it.server.shutdown()
        thread.join()
        it.server.server_close()
