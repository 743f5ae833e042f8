"""A server that keeps the OTLP requests that it receives."""

from __future__ import annotations

import http.server
from typing import Any


class Collector(http.server.ThreadingHTTPServer):
    """Keeps what it is sent."""

    daemon_threads = False
    block_on_close = True

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
