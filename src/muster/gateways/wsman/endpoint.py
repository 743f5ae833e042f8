"""The WS-Management endpoint: dispatches actions to handlers and adds the response headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import muster
from muster.core import errors
from muster.core.formats import xml
from muster.core.telemetry import metrics
from muster.gateways.soap import endpoint, envelope
from muster.gateways.wsman import enumeration, event_delivery, transfer
from muster.gateways.wsman import request as wsman_request
from muster.gateways.wsman import subscriptions as wsman_subscriptions
from muster.gateways.wsman.wire import faults, headers, namespaces
from muster.trust.permissions import roles

ENVELOPE_BYTES_MAX = 512 << 10


Action = Callable[[wsman_request.WsManRequest], Awaitable[wsman_request.ResponseParts]]


class WsManEndpoint:
    """``connect_as`` opens a client with the caller's identity; ``callbacks``: allowed event addresses.

    A subscription ends with the first event for a caller who is not ``is_current``.
    """

    def __init__(
        self,
        connect_as: event_delivery.ConnectAs,
        *,
        callbacks: Sequence[str] = (),
        is_current: endpoint.LoginCheck = endpoint.always_current,
        measure: metrics.Metrics | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._measure = measure or metrics.Metrics()
        subscriptions = event_delivery.EventSubscriptions(
            connect_as, callbacks, is_current=is_current, measure=self._measure
        )
        self.transfer = transfer.TransferHandler(connect_as)
        self.enumeration = enumeration.EnumerationHandler(connect_as, now_s)
        self.eventing = wsman_subscriptions.EventingHandler(subscriptions, now_s)
        # Read-only actions, which a viewer may use; then those that make changes.
        self._reads: dict[str, Action] = {
            namespaces.GET: self.transfer.get,
            namespaces.ENUMERATE: self.enumeration.enumerate,
            namespaces.PULL: self.enumeration.pull,
            namespaces.RELEASE: self.enumeration.release,
            namespaces.SUBSCRIBE: self.eventing.subscribe,
            namespaces.RENEW: self.eventing.renew,
            namespaces.GET_STATUS: self.eventing.get_status,
            namespaces.GET_STATUS_MISSPELT: self.eventing.get_status,
            namespaces.UNSUBSCRIBE: self.eventing.unsubscribe,
        }
        self._changes: dict[str, Action] = {
            namespaces.PUT: self.transfer.put,
            namespaces.CREATE: self.transfer.create,
            namespaces.DELETE: self.transfer.delete,
        }

    def soap_endpoint(
        self, authenticate: endpoint.Authenticate, *, limits: xml.XmlLimits | None = None
    ) -> endpoint.SoapEndpoint:
        return endpoint.SoapEndpoint(
            name="wsman",
            handle=self.handle,
            versions=(envelope.SoapVersion.V12,),
            prefixes=namespaces.PREFIXES,
            authenticate=authenticate,
            is_open=headers.is_identify,
            understood=headers.understood,
            fault_of=faults.from_error,
            fault_headers=lambda call, fault: faults.headers(call.addressing if call else None, fault),
            limits=limits or xml.XmlLimits(bytes=ENVELOPE_BYTES_MAX),
            fault_bytes_max=headers.ENVELOPE_BYTES_MIN,
            timeout_s=headers.TIMEOUT_S_MAX + 5,
            measure=self._measure,
        )

    async def close(self) -> None:
        await self.eventing.subscriptions.close()

    async def handle(self, call: endpoint.SoapRequest) -> endpoint.SoapResponse:
        if headers.is_identify(call.envelope):
            return endpoint.SoapResponse([_identity(call.location)])
        assert call.caller is not None
        read = headers.read(call, bytes_max=ENVELOPE_BYTES_MAX)
        request = wsman_request.WsManRequest(call, read, call.caller)
        action, changes = self._reads.get(read.action), False
        if action is None:
            action, changes = self._changes.get(read.action), True
        if action is None:
            request.method()  # raises a fault for an unknown action
            action = self.transfer.invoke
        if read.fragment is not None and read.action not in (namespaces.GET, namespaces.PUT):
            raise faults.unsupported("only Get and Put have fragments", "FragmentLevelAccess")
        if changes and call.caller.role == roles.Role.VIEWER:
            raise errors.Forbidden(f"{call.caller.name} has the role viewer, which cannot make changes")
        try:
            async with asyncio.timeout(read.timeout_s or wsman_request.TIMEOUT_S):
                body, more = await action(request)
        except TimeoutError as error:
            raise errors.TimedOut("the operation did not finish in time; it may still finish") from error
        return endpoint.SoapResponse(
            body,
            [*read.addressing.reply_headers(f"{read.action}Response"), *more],
            bytes_max=read.bytes_max,
            too_large=faults.encoding(
                f"the response is longer than {read.bytes_max} bytes",
                "UnreportableSuccess" if changes else "MaxEnvelopeSize",
            ),
        )


def _identity(location: str) -> xml.XmlElement:
    profile = namespaces.BASIC_TLS if location.startswith("https:") else namespaces.BASIC
    return xml.XmlElement(
        namespaces.WSMID("IdentifyResponse"),
        xml.XmlElement(namespaces.WSMID("ProtocolVersion"), str(namespaces.WSMAN)),
        xml.XmlElement(namespaces.WSMID("ProductVendor"), "Muster"),
        xml.XmlElement(namespaces.WSMID("ProductVersion"), muster.__version__),
        xml.XmlElement(
            namespaces.WSMID("SecurityProfiles"),
            xml.XmlElement(namespaces.WSMID("SecurityProfileName"), profile),
        ),
    )
