"""Doors served alone, by uvicorn (the extra ``soap``): keep-alive, ``Expect: 100-continue``, TLS.

    async with serving.Server(application, port=5985) as server:
        server.url

Two things are added to it: a connection that does not say a whole request head in time is closed, and signals
stay with whoever runs the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http import h11_impl

from muster.core import errors
from muster.soap import asgi

HEAD_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 512
STOP_S = 3


class Server:
    def __init__(
        self,
        application: asgi.Application,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: str | None = None,
        key: str | None = None,
    ) -> None:
        self._application = application
        self._certificate = certificate
        self._key = key
        self._server: _Quiet
        self._task: asyncio.Task[None] | None = None
        self.host = host
        self.port = port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._certificate else 'http'}://{host}:{self.port}"

    async def start(self) -> None:
        config = uvicorn.Config(
            self._application,
            http=_Patient,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
        )
        try:
            await asyncio.to_thread(config.load)
            listening = await asyncio.to_thread(_listen, self.host, self.port)
        except (OSError, ssl.SSLError) as error:
            raise errors.Unavailable(
                f"cannot serve on {self.host}:{self.port}: {error.strerror or error}",
                hint="name another port, or 0 for a free one",
            ) from error
        self.port = listening.getsockname()[1]
        self._server = _Quiet(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="soap doors")
        await self._server.ready.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Quiet(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Patient(h11_impl.H11Protocol):
    """Waits for a request's head, but not for ever."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: h11_impl.RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def _listen(host: str, port: int) -> Any:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)
