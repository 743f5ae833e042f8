"""WS-Transfer and custom methods: read, change, create, rename and delete a resource, or execute an
operation.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.wsman import event_delivery
from muster.gateways.wsman import request as wsman_request
from muster.gateways.wsman.wire import faults, fragments, headers, namespaces, representations

_METHODS_OURS = ("Rename",)


class TransferHandler:
    def __init__(self, connect_as: event_delivery.ConnectAs) -> None:
        self._connect_as = connect_as

    async def get(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        resource = await self._read(request)
        if request.headers.fragment is not None:
            path, text = fragments.read(request.headers.fragment, request.kind)
            return wsman_request.build_response(
                fragments.get(resource, path, text=text), more=[request.headers.fragment]
            )
        return wsman_request.build_response(resource)

    async def _read(self, request: wsman_request.WsManRequest) -> xml.XmlElement:
        kind = request.kind
        headers.check_selectors(request.selectors)
        name = request.selectors["Name"]
        async with self._connect_as(request.caller) as fleet:
            if kind == namespaces.RESOURCE:
                return representations.resource(await fleet.describe(name))
            rows = await (fleet.agents() if kind == namespaces.AGENT else fleet.managers())
        for row in rows:
            if row.name == name:
                return representations.simple(kind, row)
        raise errors.NotFound(f"no {namespaces.KINDS[kind].lower()} {name[:128]!r}")

    async def put(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        request.only_resources()
        headers.check_selectors(request.selectors)
        name = request.selectors["Name"]
        async with self._connect_as(request.caller) as fleet:
            described = await fleet.describe(name)
            body = request.body
            if request.headers.fragment is not None:
                path, text = fragments.read(request.headers.fragment, request.kind)
                body = fragments.put(representations.resource(described), path, body, text=text)
            desired, generation = representations.entry(body)
            changes = representations.changes(described, desired)
            if changes:
                described = await self._changing(
                    fleet.put(name, generation=generation, **changes), namespaces.WXF("InvalidRepresentation")
                )
            if desired["name"] != name:
                described = await self._changing(
                    fleet.rename(name, desired["name"]), namespaces.WXF("InvalidRepresentation")
                )
        more = []
        if request.headers.wants_epr:
            reference = request.reference(described.name, namespaces.WSA("EndpointReference"))
            more.append(xml.XmlElement(namespaces.WSMAN("RequestedEPR"), reference))
        if request.headers.fragment is not None:
            return wsman_request.build_response(more=[request.headers.fragment, *more])
        return wsman_request.build_response(representations.resource(described), more=more)

    async def create(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        request.only_resources()
        entry, _ = representations.entry(request.body)
        selected = request.selectors.get("Name")
        if selected is not None and selected != entry["name"]:
            raise faults.selectors(
                f"the selector has the name {selected[:60]!r}, the body another one", "InvalidValue"
            )
        async with self._connect_as(request.caller) as fleet:
            described = await self._changing(fleet.create(entry), namespaces.WXF("InvalidRepresentation"))
        return wsman_request.build_response(
            request.reference(described.name, namespaces.WXF("ResourceCreated"))
        )

    async def delete(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        request.only_resources()
        headers.check_selectors(request.selectors)
        async with self._connect_as(request.caller) as fleet:
            await fleet.delete(request.selectors["Name"])
        return wsman_request.build_response()

    @staticmethod
    async def _changing(work: Awaitable[Any], subcode: str) -> Any:
        """Report invalid values as the fault ``subcode``."""
        try:
            return await work
        except errors.InvalidInput as error:
            raise faults.fault(subcode, faults.public_message(error), "InvalidValues") from error

    # Methods

    async def invoke(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        kind, method = request.kind, request.method()
        request.only_resources()
        headers.check_selectors(request.selectors)
        name = request.selectors["Name"]
        arguments = representations.arguments(request.body, method)
        async with self._connect_as(request.caller) as fleet:
            if method in _METHODS_OURS:
                new = arguments.get("NewName")
                if not isinstance(new, str) or len(arguments) != 1:
                    raise faults.parameter("Rename takes one parameter, NewName", "InvalidName")
                described = await fleet.rename(name, new.strip())
                result = request.reference(described.name, kind("Result"))
            else:
                timeout_s = request.headers.timeout_s or wsman_request.TIMEOUT_S
                value = await fleet.execute(name, method, arguments, timeout_s=timeout_s)
                result = representations.item("", value, kind, tag="Result")
        return wsman_request.build_response(
            xml.XmlElement(kind(f"{method}_OUTPUT"), result, xml.XmlElement(kind("ReturnValue"), "0"))
        )
