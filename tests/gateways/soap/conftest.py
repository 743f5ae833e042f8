from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from muster.bus.http import server as http_server
from muster.core import errors
from muster.core.formats import xml
from muster.core.telemetry import metrics
from muster.gateways.soap import asgi, endpoint, envelope, faults
from muster.gateways.soap import server as soap_server
from muster.trust.login import passwords
from muster.trust.permissions import roles

NS = xml.XmlNamespace("urn:echo")


async def respond(to: endpoint.SoapEndpoint, request: endpoint.SoapHttpRequest) -> http_server.HttpResponse:
    """As the application, to a request whose body has been read."""
    admitted = await to.admit(request)
    if isinstance(admitted, http_server.HttpResponse):
        return admitted
    if len(request.body) > admitted.limits.bytes and not await to.admit_large(request.body, admitted):
        return to.too_large(request.headers, admitted)
    return await to.process(request, admitted)


class Echo:
    """An endpoint that echoes its request, with special requests that fail."""

    def __init__(self) -> None:
        self.measure = metrics.Metrics()
        self.calls: list[endpoint.SoapRequest] = []
        self.called = asyncio.Event()
        self.endpoint = endpoint.SoapEndpoint(
            name="echo",
            handle=self.handle,
            authenticate=self.authenticate,
            is_open=lambda message: message.first is not None and message.first.name == NS("Open"),
            prefixes={NS: "e"},
            documents={"wsdl": lambda location: f"<wsdl at='{location}'/>".encode()},
            limits=xml.XmlLimits(bytes=20_000),
            timeout_s=0.2,
            measure=self.measure,
        )
        self.application = asgi.SoapApplication({"/echo": self.endpoint})

    async def authenticate(self, name: str, password: str, _: str) -> passwords.PasswordLogin:
        if (name, password) != ("ann", "sesäm"):
            raise errors.Unauthorized("wrong name or password")
        return passwords.PasswordLogin(name, roles.Role.USER)

    async def handle(self, call: endpoint.SoapRequest) -> endpoint.SoapResponse:
        self.calls.append(call)
        self.called.set()
        first_element = call.envelope.first
        if first_element is None:
            return endpoint.SoapResponse()
        match first_element.local:
            case "Missing":
                raise errors.NotFound("no such thing", hint="look elsewhere")
            case "Bug":
                raise ZeroDivisionError("secret")
            case "Hang":
                await asyncio.Event().wait()
            case "Fault":
                raise faults.SoapFault(
                    faults.SoapFaultCode.SENDER,
                    "no",
                    subcode=NS("Denied"),
                    details=[xml.XmlElement(NS("why"), "so")],
                )
            case "Long":
                return endpoint.SoapResponse([xml.XmlElement(NS("a"), "x" * 5000)], bytes_max=4000)
        headers = [xml.XmlElement(NS("caller"), call.caller.name)] if call.caller else []
        return endpoint.SoapResponse([first_element], headers)

    def counted(self, reason: str) -> bool:
        text = self.measure.exposition("")[1].decode()
        return f'muster_soap_refused_total{{endpoint="echo",reason="{reason}"}}' in text


def message(
    body: str = "<e:Hello/>", headers: str = "", version: envelope.SoapVersion = envelope.SoapVersion.V12
) -> bytes:
    return (
        f'<s:Envelope xmlns:s="{version.value}" xmlns:e="{NS}"><s:Header>{headers}</s:Header>'
        f"<s:Body>{body}</s:Body></s:Envelope>"
    ).encode()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def url(echo):
    async with soap_server.SoapServer(echo.application) as server:
        yield f"{server.url}/echo"


def request(body: bytes, **changes: Any) -> endpoint.SoapHttpRequest:
    made = endpoint.SoapHttpRequest(
        "POST",
        "/echo",
        headers={"content-type": "application/soap+xml", "authorization": "Basic YW5uOnNlc8OkbQ=="},
        body=body,
        location="http://here/echo",
    )
    return dataclasses.replace(made, **changes)
