"""Another UDDI v3 registry as a back end: its services, requested over SOAP from its inquiry API.

They have the same attributes as the services of this domain, so one predicate finds both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muster.bus.http import client
from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import envelope
from muster.gateways.uddi import records
from muster.gateways.uddi.model import entities, schema
from muster.inform.mounts import base, registry

U = schema.UDDI
ROWS = 500  # in one response
DETAILS = 100
CONCURRENT_MAX = 4
_LIMITS = xml.XmlLimits(bytes=16 << 20, elements=500_000)


class UddiMount:
    def __init__(self, url: str, *, timeout_s: float = base.TIMEOUT_S) -> None:
        self._url = url
        self._timeout_s = timeout_s

    async def entries(self) -> Sequence[base.MountedEntry]:
        keys: list[str] = []
        while len(keys) < base.ENTRIES_MAX:
            listed = await self._request(
                xml.XmlElement(
                    U("find_service"),
                    xml.XmlElement(
                        U("findQualifiers"), xml.XmlElement(U("findQualifier"), "approximateMatch")
                    ),
                    xml.XmlElement(U("name"), "%"),
                    attributes={"maxRows": str(ROWS), "listHead": str(len(keys) + 1)},
                )
            )
            page = [
                info.get("serviceKey") or ""
                for info in entities.inside(listed, "serviceInfos", "serviceInfo")
            ]
            keys += page
            if len(page) < ROWS and listed.get("truncated") != "true":
                break
            if not page:
                break
        gate = asyncio.Semaphore(CONCURRENT_MAX)

        async def load_details(first: int) -> list[base.MountedEntry]:
            async with gate:
                return await self._details(keys[first : first + DETAILS])

        pages = await asyncio.gather(*map(load_details, range(0, len(keys), DETAILS)))
        return [entry for details in pages for entry in details]

    async def entry(self, key: str) -> base.MountedEntry | None:
        try:
            entries = await self._details([key])
        except errors.NotFound:
            return None
        return entries[0] if entries else None

    async def _details(self, keys: Sequence[str]) -> list[base.MountedEntry]:
        elements = [xml.XmlElement(U("serviceKey"), key) for key in keys]
        detail = await self._request(xml.XmlElement(U("get_serviceDetail"), *elements))
        return [_entry(service) for service in detail.all(U("businessService"))]

    async def _request(self, request: xml.XmlElement) -> xml.XmlElement:
        http_response = await client.post(
            self._url,
            envelope.write(envelope.SoapVersion.V11, [request], prefixes=schema.PREFIXES),
            headers={
                "Content-Type": envelope.SoapVersion.V11.content_type,
                "SOAPAction": f'"{request.local}"',
            },
            timeout_s=self._timeout_s,
        )
        try:
            response = envelope.read(xml.parse(http_response.body, _LIMITS)).first
        except errors.MusterError as error:
            raise errors.Unavailable(
                f"the server at {self._url} is not a UDDI registry: {error.message}"
            ) from error
        if response is None:
            raise errors.Unavailable(f"{self._url} sent an empty response to {request.local}")
        if response.local == "Fault":
            reason = response.text_of("faultstring")
            if "E_invalidKeyPassed" in str(response):
                raise errors.NotFound(f"{self._url}: {reason}")
            raise errors.Unavailable(f"{self._url} rejected {request.local}: {reason}")
        return response


def _entry(service: xml.XmlElement) -> base.MountedEntry:
    attributes = records.attributes("service", service, 0.0)
    for ours in ("created", "uddi"):
        del attributes[ours]
    return base.MountedEntry(service.get("serviceKey") or "", xml.write(service, schema.PREFIXES), attributes)


#: The back ends of a domain's nodes.
BACKENDS: registry.Backends = {**registry.BACKENDS, "uddi": lambda settings: UddiMount(settings.url)}
