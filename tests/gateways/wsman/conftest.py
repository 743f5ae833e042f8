from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import asgi, envelope
from muster.gateways.soap import server as soap_server
from muster.gateways.wsman import endpoint
from muster.gateways.wsman.wire import namespaces
from muster.manage import client
from muster.testing.eventually import eventually
from muster.trust.login import passwords
from muster.trust.permissions import roles

NAME, PASSWORD = "ann", "open-sesame"
V12 = envelope.SoapVersion.V12
ANONYMOUS = f"{namespaces.WSA}/role/anonymous"


async def authenticate(name: str, password: str, _: str) -> passwords.PasswordLogin:
    if password != PASSWORD:
        raise errors.Unauthorized("wrong name or password")
    return passwords.PasswordLogin(name, roles.Role.VIEWER if name == "vic" else roles.Role.OPERATOR)


@dataclass
class WsMan:
    """The WS-Management endpoint over a fleet, and methods to send any message to it."""

    wsman_endpoint: endpoint.WsManEndpoint
    url: str
    http: httpx.AsyncClient
    fleet: Any
    port: int = 0
    last: httpx.Response | None = None
    user: str = NAME
    changed: set[str] = field(default_factory=set)  # users whose password or role has changed

    async def post(self, data: bytes | str, **headers: str) -> envelope.SoapEnvelope:
        content = data if isinstance(data, bytes) else data.encode()
        self.last = await self.http.post(
            self.url,
            content=content,
            headers={"content-type": "application/soap+xml;charset=UTF-8", **headers},
            auth=(self.user, PASSWORD),
        )
        return envelope.read(xml.parse(self.last.content))

    async def ask(
        self,
        action: str,
        body: str = "",
        *,
        uri: str = namespaces.RESOURCE,
        name: str | None = None,
        headers: str = "",
        reply_to: str = ANONYMOUS,
        size: int = 153_600,
    ) -> envelope.SoapEnvelope:
        selectors = ""
        if name is not None:
            selectors = f'<w:SelectorSet><w:Selector Name="Name">{name}</w:Selector></w:SelectorSet>'
        return await self.post(
            f"""<s:Envelope xmlns:s="{V12.value}" xmlns:a="{namespaces.WSA}" xmlns:w="{namespaces.WSMAN}"
            xmlns:n="{namespaces.WSEN}" xmlns:e="{namespaces.WSE}" xmlns:p="{namespaces.RESOURCE}"><s:Header>
            <a:To>{self.url}</a:To><a:Action s:mustUnderstand="true">{action}</a:Action>
            <w:ResourceURI>{uri}</w:ResourceURI><a:MessageID>uuid:1</a:MessageID>
            <w:MaxEnvelopeSize s:mustUnderstand="true">{size}</w:MaxEnvelopeSize>
            <a:ReplyTo><a:Address>{reply_to}</a:Address></a:ReplyTo>{selectors}{headers}
            </s:Header><s:Body>{body}</s:Body></s:Envelope>"""
        )

    async def is_now(self, name: str, state: str) -> None:
        async def look() -> bool:
            return bool((await self.fleet.client.get(name))[0].state == state)

        await eventually(look, timeout_s=30)

    async def fault(self, *arguments: Any, **options: Any) -> tuple[str, str, str]:
        """Code, subcode and detail, without what stands before them."""
        return fault_details(await self.ask(*arguments, **options))


def fault_details(answer: envelope.SoapEnvelope) -> tuple[str, str, str]:
    fault = answer.first
    assert fault is not None
    assert fault.name == V12("Fault"), fault
    values = [node.text for node in fault.walk() if node.name == V12("Value")]
    detail = [node.text for node in fault.walk() if node.name == namespaces.WSMAN("FaultDetail")]
    subcode = values[1] if len(values) > 1 else ""
    return values[0], subcode, detail[0].rpartition("/")[2] if detail else ""


@dataclass
class Sink:
    """Takes pushed events."""

    url: str = ""
    taken: asyncio.Queue[envelope.SoapEnvelope] = field(default_factory=asyncio.Queue)
    answers: list[tuple[int, str]] = field(default_factory=list)
    acknowledges: bool = False
    requests: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        data = b""
        while True:
            part = await receive()
            data += part.get("body", b"")
            if not part.get("more_body"):
                break
        self.requests += 1
        status, body = self.answers.pop(0) if self.answers else (200, "")
        if status < 300:
            message = envelope.read(xml.parse(data))
            if self.acknowledges:
                id = message.header(namespaces.WSA("MessageID"))
                assert id is not None
                headers = [
                    xml.XmlElement(namespaces.WSA("Action"), namespaces.ACK),
                    xml.XmlElement(namespaces.WSA("RelatesTo"), id.text),
                ]
                body = envelope.write(V12, [], headers).decode()
            self.taken.put_nowait(message)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body.encode()})

    async def next(self) -> envelope.SoapEnvelope:
        async with asyncio.timeout(30):
            return await self.taken.get()


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    made = Sink()
    async with soap_server.SoapServer(made) as server:  # type: ignore[arg-type]
        made.url = f"{server.url}/events"
        yield made


@pytest.fixture
async def wsman(fleet, connect, sink) -> AsyncIterator[WsMan]:
    buses: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def visit(caller: passwords.PasswordLogin) -> AsyncIterator[client.ManageClient]:
        if caller.name not in buses:
            buses[caller.name] = await connect(f"wsman-{caller.name}")
        yield client.ManageClient(buses[caller.name])

    await fleet.registry()
    await fleet.manager()
    await fleet.agent()
    changed: set[str] = set()

    async def is_current(caller: passwords.PasswordLogin) -> bool:
        return caller.name not in changed

    made = endpoint.WsManEndpoint(visit, callbacks=[sink.url], is_current=is_current)
    application = asgi.SoapApplication({"/wsman": made.soap_endpoint(authenticate)})
    async with soap_server.SoapServer(application) as server, httpx.AsyncClient() as http:
        yield WsMan(made, f"{server.url}/wsman", http, fleet, server.port, changed=changed)
        await made.close()


@pytest.fixture
def create(wsman):
    """A resource that does nothing, up."""

    async def make(name: str, **labels: str) -> None:
        await wsman.fleet.client.create(
            {"name": name, "type": "memory", "agent": "host-a", "labels": labels, "config": {"value": 1}}
        )
        await wsman.fleet.client.wait(name, "up")

    return make
