from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest_asyncio

from muster.bus import api
from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import asgi, envelope
from muster.gateways.soap import server as soap_server
from muster.gateways.uddi import endpoints, inquiry, publication, registry
from muster.gateways.uddi.model import schema
from muster.inform import client, service_entries
from muster.trust.login import passwords
from muster.trust.permissions import roles

U = schema.UDDI
PASSWORDS = {"ann": "open-sesame", "bob": "open-simsim"}


class UddiClock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        import time

        return time.time() + self.ahead_s


@dataclass
class Uddi:
    """The UDDI endpoints, and methods to send any message to them."""

    url: str
    http: httpx.AsyncClient
    clock: UddiClock
    contexts: client.InformClient
    services: service_entries.ServiceEntries
    visit: Callable[[str], contextlib.AbstractAsyncContextManager[api.Bus]]

    def publication(self, held: registry.UddiRegistry) -> publication.PublicationHandler:
        return publication.PublicationHandler(held, inquiry.InquiryHandler(held))

    async def post(self, path: str, data: str | bytes, content_type: str = "text/xml") -> httpx.Response:
        content = data if isinstance(data, bytes) else data.encode()
        return await self.http.post(
            f"{self.url}{path}", content=content, headers={"content-type": content_type}
        )

    async def say(self, body: str, path: str = "/uddi") -> xml.XmlElement | None:
        """The element in the body of the answer."""
        request = re.sub(r"<(/?)(\w+)(?=[\s/>])", r"<\1u:\2", body)
        response = await self.post(
            path,
            f'<s:Envelope xmlns:s="{envelope.SoapVersion.V11.value}" xmlns:u="{U}"><s:Body>{request}</s:Body>'
            "</s:Envelope>",
        )
        return envelope.read(xml.parse(response.content)).first

    async def ask(self, body: str, path: str = "/uddi") -> xml.XmlElement:
        element = await self.say(body, path)
        assert element is not None
        assert element.local != "Fault", element
        schema.validate(element)  # what we say keeps to the standard's schema as well
        return element

    async def fault(self, body: str, path: str = "/uddi") -> str:
        """The code of the error, after a look at the shape of its report."""
        element = await self.say(body, path)
        assert element is not None
        assert element.local == "Fault", element
        detail = element.find("detail")
        assert detail is not None, element
        assert isinstance(detail.content[0], xml.XmlElement), "the report comes first, before any white space"
        schema.validate(detail.content[0])
        (result,) = detail.content[0].children
        code: Any = result.children[0].get("errCode")
        return str(code)

    async def token(self, name: str = "ann") -> str:
        element = await self.ask(f'<get_authToken userID="{name}" cred="{PASSWORDS[name]}"/>')
        return f"<authInfo>{element.text_of(U('authInfo'))}</authInfo>"


async def login(name: str, password: str, _: str) -> passwords.PasswordLogin:
    if PASSWORDS.get(name) != password:
        raise errors.Unauthorized("wrong name or password")
    return passwords.PasswordLogin(name, roles.Role.USER)


@pytest_asyncio.fixture
async def uddi(start_node, connect) -> AsyncIterator[Uddi]:
    await start_node("n1", replicas=1)
    contexts = client.InformClient(await connect("carl"))
    buses: dict[str, api.Bus] = {}

    @contextlib.asynccontextmanager
    async def visit(name: str, role: str) -> AsyncIterator[api.Bus]:
        assert role == ("viewer" if name == "uddi" else "user")
        if name not in buses:
            buses[name] = await connect(name)
        yield buses[name]

    clock = UddiClock()
    made = endpoints.UddiEndpoints(registry.UddiRegistry(visit), login, now_s=clock)
    async with (
        soap_server.SoapServer(asgi.SoapApplication(made.endpoints())) as server,
        httpx.AsyncClient() as http,
    ):
        yield Uddi(
            server.url,
            http,
            clock,
            contexts,
            service_entries.ServiceEntries(contexts),
            lambda name: visit(name, "user"),
        )
