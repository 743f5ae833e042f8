"""How an agent reaches its domain: TLS, WebSocket with TLS, through an HTTP proxy, by the locator."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

import pytest

from muster import connection
from muster.app import certificates, domain
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.core import errors
from muster.core.settings import loader
from muster.manage import client
from muster.manage.agent import agent
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from muster.testing.eventually import eventually
from muster.trust.permissions import roles

MANIFEST = "resources: [{name: a, type: memory, agent: host-b}]"


class RecordingProxy:
    """A small HTTP proxy with CONNECT only, which records the requested targets."""

    def __init__(self, secret: str = "") -> None:
        self.asked: list[str] = []
        self.carried_bytes = 0
        self._secret = secret
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> RecordingProxy:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, where, _ = head.split(" ", 2)
            if method != "CONNECT" or self._secret not in head:
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                writer.close()
                return
            self.asked.append(where)
            host, _, port = where.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            try:
                await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
            finally:
                far_writer.close()
                writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.carried_bytes += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def secured(tmp_path):
    """A domain whose brokers speak TLS, by socket and by WebSocket; management in this process."""
    flags = {
        "domain.data_dir": str(tmp_path),
        "bus.tls": "on",
        "bus.websocket": True,
        "manage.enabled": False,
    }
    made = loader.load(app_settings.Settings, flags=flags)
    async with contextlib.AsyncExitStack() as stack:
        running: Any = await stack.enter_async_context(
            domain.Domain(made, components=factories.components(made))
        )
        registry = await stack.enter_async_context(await running.connect("registry-1", roles.Role.REGISTRY))
        await stack.enter_async_context(endpoint.RegistryEndpoint(registry))
        bus = await stack.enter_async_context(await running.connect("manager-1", roles.Role.MANAGER))
        await stack.enter_async_context(manager.Manager(bus, tick_s=0.05))
        admin = await stack.enter_async_context(await running.connect("admin", roles.Role.OPERATOR))
        running.fleet = client.ManageClient(admin)
        running.creds = await asyncio.to_thread(_issue, running)
        running.tls = await asyncio.to_thread(certificates.client_tls, made)
        yield running


def _issue(running: Any) -> Any:
    running.trust.issue("host-b", roles.Role.AGENT)
    return running.trust.credentials("host-b")


async def websocket_url(running: Any) -> str:
    (actual,) = await running.brokers.describe()
    return str(actual.websocket_url)


async def hosts(running: Any, bus: Any, tmp_path: Any) -> None:
    async with agent.Agent(bus, tmp_path / "hosted", beat_s=0.2):
        await running.fleet.apply(MANIFEST)
        await running.fleet.wait("a", "up")
        assert await running.fleet.execute("a", "echo", {"text": "hi"}) == "hi"
        await running.fleet.delete("a")
        await running.fleet.wait_gone("a")


async def test_by_tls_and_the_locator(secured, tmp_path):
    url = secured.running.locator_url

    async def connect_by_locator() -> Any:
        try:
            return await connection.connect(locator=url, creds=secured.creds, tls=secured.tls)
        except errors.Unavailable:  # a busy machine's may need longer than it is given
            return None

    async with await eventually(connect_by_locator) as bus:
        await hosts(secured, bus, tmp_path)


async def test_by_websocket_with_tls(secured, tmp_path):
    url = await websocket_url(secured)
    assert url.startswith("wss://")
    async with await connection.connect(url, creds=secured.creds, tls=secured.tls) as bus:
        await hosts(secured, bus, tmp_path)
    with pytest.raises(errors.Unavailable):
        await connection.connect(url, creds=secured.creds, tls=ssl.create_default_context())


@pytest.mark.parametrize("way", ["tls", "websocket"])
async def test_through_an_http_proxy(secured, tmp_path, way):
    url = await websocket_url(secured) if way == "websocket" else secured.servers[0]
    async with RecordingProxy() as proxy:
        address = f"http://127.0.0.1:{proxy.port}"
        async with await connection.connect(url, creds=secured.creds, tls=secured.tls, proxy=address) as bus:
            await hosts(secured, bus, tmp_path)
            assert proxy.asked == [url.rpartition("/")[2]]
            assert proxy.carried_bytes > 1000


async def test_a_proxy_that_wants_a_password_or_is_not_there(secured):
    arguments: dict[str, Any] = {"creds": secured.creds, "tls": secured.tls}
    async with RecordingProxy(secret="Proxy-Authorization: Basic YW5uOnN3b3JkZmlzaA==") as proxy:
        address = f"127.0.0.1:{proxy.port}"
        with pytest.raises(errors.Unavailable, match="a password"):
            await connection.connect(secured.servers[0], proxy=f"http://{address}", **arguments)
        url = f"http://ann:swordfish@{address}"
        async with await connection.connect(secured.servers[0], proxy=url, **arguments) as bus:
            await bus.flush()
            await eventually(lambda: proxy.asked)
    with pytest.raises(errors.Unavailable):
        await connection.connect(secured.servers[0], proxy=f"http://{address}", **arguments)
