from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import asgi, endpoint, envelope
from muster.gateways.soap import server as soap_server
from muster.gateways.wscontext import handler, schema
from muster.inform import activities, client
from muster.trust.login import passwords
from muster.trust.permissions import roles

NAME, PASSWORD = "ann", "open-sesame"
WSCTX = schema.WSCTX


async def authenticate(name: str, password: str, _: str) -> passwords.PasswordLogin:
    if password != PASSWORD:
        raise errors.Unauthorized("wrong name or password")
    return passwords.PasswordLogin(name, roles.Role.USER)


@dataclass
class WsContext:
    """The WS-Context endpoints over an information node, and methods to send any message to them."""

    url: str
    http: httpx.AsyncClient
    node: Any
    sink: list[envelope.SoapEnvelope]
    sink_url: str
    user: str = NAME
    version: envelope.SoapVersion = envelope.SoapVersion.V12
    last: httpx.Response | None = None

    async def post(self, data: bytes | str, path: str = "/context") -> httpx.Response:
        self.last = await self.http.post(
            f"{self.url}{path}",
            content=data,
            headers={"content-type": self.version.content_type},
            auth=(self.user, PASSWORD),
        )
        return self.last

    async def ask(self, body: str, context: str | None = None, headers: str = "") -> xml.XmlElement:
        """What stands in the body of the answer."""
        operation = re.split(r"[\s/>]", body.lstrip("<"))[0]
        path = "/contextmanager" if operation in schema.MANAGER else "/context"
        if context is not None:
            headers += f"<c:context><c:context-identifier>{context}</c:context-identifier></c:context>"
        wrapped = re.sub(r"<(/?)(?!x:)(\w)", r"<\1c:\2", body)
        answer = await self.post(
            f'<s:Envelope xmlns:s="{self.version.value}" xmlns:c="{WSCTX}" xmlns:x="urn:x">'
            f"<s:Header>{headers}</s:Header><s:Body>{wrapped}</s:Body></s:Envelope>",
            path,
        )
        if answer.status_code == 202:
            return xml.XmlElement("accepted")
        content = envelope.read(xml.parse(answer.content))
        assert content.version is self.version
        assert content.first is not None
        return content.first

    async def begin(self, context: str | None = None, body: str = "<begin/>") -> str:
        answer = await self.ask(body, context)
        assert answer.name == WSCTX("begun"), answer
        return answer.children[0].text_of(WSCTX("context-identifier"))

    async def fault(self, body: str, context: str | None = None, headers: str = "") -> str:
        """The name of the element in the fault's detail."""
        answer = await self.ask(body, context, headers)
        assert answer.local == "Fault", answer
        detail = next(child for child in answer.children if child.local.lower() == "detail")
        if self.version is envelope.SoapVersion.V12:
            subcode = [node.qname() for node in answer.walk() if node.local == "Value"][1]
            assert subcode == detail.children[0].name
        return detail.children[0].local


@pytest.fixture
async def wscontext(start_node, connect) -> AsyncIterator[WsContext]:
    node = await start_node("n1", replicas=1)
    buses: dict[str, Any] = {}
    taken: list[envelope.SoapEnvelope] = []

    @contextlib.asynccontextmanager
    async def visit(caller: passwords.PasswordLogin) -> AsyncIterator[activities.Activities]:
        if caller.name not in buses:
            buses[caller.name] = await connect(caller.name)
        yield activities.Activities(client.InformClient(buses[caller.name]), time.time_ns)

    async def sink(call: endpoint.SoapRequest) -> endpoint.SoapResponse:
        taken.append(call.envelope)
        return endpoint.SoapResponse()

    listening = asgi.SoapApplication({"/replies": endpoint.SoapEndpoint(name="sink", handle=sink)})
    async with soap_server.SoapServer(listening) as back, httpx.AsyncClient() as http:
        made = handler.WsContextHandler(visit, callbacks=[f"{back.url}/replies"])
        async with soap_server.SoapServer(asgi.SoapApplication(made.endpoints(authenticate))) as server:
            yield WsContext(server.url, http, node, taken, f"{back.url}/replies")
