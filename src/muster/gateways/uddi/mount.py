"""Another UDDI v3 registry as a back end: its services, asked for over SOAP at its inquiry port.

They come with the attributes that our own services have, so one predicate finds both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muster.bus.http import server
from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import envelope
from muster.gateways.uddi import records
from muster.gateways.uddi.model import entities, schema
from muster.inform.mounts import base, registry

U = schema.UDDI
ROWS = 500  # in one answer
DETAILS = 100
TOGETHER = 4
_LIMITS = xml.XmlLimits(bytes=16 << 20, elements=500_000)


class UddiMount:
    def __init__(self, url: str, *, timeout_s: float = base.TIMEOUT_S) -> None:
        self._url = url
        self._timeout_s = timeout_s

    async def entries(self) -> Sequence[base.MountedEntry]:
        keys: list[str] = []
        while len(keys) < base.ENTRIES_MAX:
            listed = await self._ask(
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
                one.get("serviceKey") or "" for one in entities.inside(listed, "serviceInfos", "serviceInfo")
            ]
            keys += page
            if len(page) < ROWS and listed.get("truncated") != "true":
                break
            if not page:
                break
        gate = asyncio.Semaphore(TOGETHER)

        async def some(first: int) -> list[base.MountedEntry]:
            async with gate:
                return await self._details(keys[first : first + DETAILS])

        found = await asyncio.gather(*map(some, range(0, len(keys), DETAILS)))
        return [one for each in found for one in each]

    async def entry(self, key: str) -> base.MountedEntry | None:
        try:
            found = await self._details([key])
        except errors.NotFound:
            return None
        return found[0] if found else None

    async def _details(self, keys: Sequence[str]) -> list[base.MountedEntry]:
        asked = [xml.XmlElement(U("serviceKey"), key) for key in keys]
        answer = await self._ask(xml.XmlElement(U("get_serviceDetail"), *asked))
        return [_found(one) for one in answer.all(U("businessService"))]

    async def _ask(self, asked: xml.XmlElement) -> xml.XmlElement:
        answer = await server.post(
            self._url,
            envelope.write(envelope.SoapVersion.V11, [asked], prefixes=schema.PREFIXES),
            headers={
                "Content-Type": envelope.SoapVersion.V11.content_type,
                "SOAPAction": f'"{asked.local}"',
            },
            timeout_s=self._timeout_s,
        )
        try:
            found = envelope.read(xml.parse(answer.body, _LIMITS)).first
        except errors.MusterError as error:
            raise errors.Unavailable(f"what answers at {self._url} is no UDDI: {error.message}") from error
        if found is None:
            raise errors.Unavailable(f"{self._url} said nothing to {asked.local}")
        if found.local == "Fault":
            said = found.text_of("faultstring")
            if "E_invalidKeyPassed" in str(found):
                raise errors.NotFound(f"{self._url}: {said}")
            raise errors.Unavailable(f"{self._url} refuses {asked.local}: {said}")
        return found


def _found(service: xml.XmlElement) -> base.MountedEntry:
    attributes = records.attributes("service", service, 0.0)
    for ours in ("created", "uddi"):
        del attributes[ours]
    return base.MountedEntry(service.get("serviceKey") or "", xml.write(service, schema.PREFIXES), attributes)


#: What a node of a domain can mount.
BACKENDS: registry.Backends = {**registry.BACKENDS, "uddi": lambda settings: UddiMount(settings.url)}
