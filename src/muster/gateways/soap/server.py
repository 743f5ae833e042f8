"""SOAP endpoints in a server of their own, uvicorn (the extra ``soap``): keep-alive, ``Expect:
100-continue``, TLS.

    async with server.SoapServer(application, listener=listening) as soap_server:
        soap_server.url
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from typing import Self

import uvicorn

from muster.bus.http import asgi_server
from muster.core import errors
from muster.core.net import tls
from muster.gateways.soap import asgi
from muster.supervision import tasks
from muster.trust import certificates

CONNECTIONS_MAX = 512
OF_ADDRESS_MAX = 128
STOP_S = 3


class SoapServer:
    """``listener``: a listening socket; without one, of a free port of this machine.

    ``behind_proxy``: all clients connect through a proxy, so the peer address of a connection is not the
    client's.
    """

    def __init__(
        self,
        application: asgi.SoapApplication,
        *,
        listener: socket.socket | None = None,
        certificate: str | None = None,
        key: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
        of_address_max: int = OF_ADDRESS_MAX,
        behind_proxy: bool = False,
    ) -> None:
        self._application = application
        self._listener = listener
        self._certificate = certificate
        self._key = key
        self._connections_max = connections_max
        self._of_address_max = None if behind_proxy else of_address_max
        self._server: asgi_server.AsgiServer
        self._task: asyncio.Task[None] | None = None
        self._tasks = tasks.TaskSupervisor("SOAP")
        self.host, self.port = "", 0

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._certificate else 'http'}://{host}:{self.port}"

    async def start(self) -> None:
        config = uvicorn.Config(
            self._application,
            http=asgi_server.AsgiProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # only the header of `soap.forwarded_header` is trusted
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
        )
        try:
            await asyncio.to_thread(config.load)
        except (OSError, ssl.SSLError) as error:
            raise errors.Unavailable(f"cannot serve SOAP: {error.strerror or error}") from error
        listener = self._listener or socket.create_server(("127.0.0.1", 0), backlog=256)
        self.host, self.port = listener.getsockname()[:2]
        if config.ssl is not None and self._certificate is not None:
            served = tls.RenewableTls(config.ssl, self._certificate, self._key)
            self._tasks.loop("certificate", functools.partial(certificates.keep_current, served))
        self._server = asgi_server.AsgiServer(
            config, connections_max=self._connections_max, of_address_max=self._of_address_max
        )
        self._task = self._tasks.spawn("server", self._server.serve(sockets=[listener]))
        await self._server.ready.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
        await self._tasks.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
