"""The door itself: what is asked goes to whoever does it, and the answer gets its headers."""

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
from muster.gateways.wsman import eventing as wsman_eventing
from muster.gateways.wsman import request as wsman_request
from muster.gateways.wsman.wire import faults, headers, namespaces
from muster.trust.permissions import roles

ENVELOPE_BYTES_MAX = 512 << 10


Action = Callable[[wsman_request.WsManRequest], Awaitable[wsman_request.Told]]


class WsManEndpoint:
    """``visit`` gives a client under the caller's identity; ``callbacks`` is where events may go."""

    def __init__(
        self,
        visit: event_delivery.Visit,
        *,
        callbacks: Sequence[str] = (),
        measure: metrics.Metrics | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._measure = measure or metrics.Metrics()
        subscriptions = event_delivery.EventSubscriptions(visit, callbacks, measure=self._measure)
        self.transfer = transfer.TransferHandler(visit)
        self.enumerating = enumeration.EnumerationHandler(visit, now_s)
        self.subscribing = wsman_eventing.EventingHandler(subscriptions, now_s)
        # What changes nothing in the fleet, so that a viewer may ask it; then what does.
        self._reads: dict[str, Action] = {
            namespaces.GET: self.transfer.get,
            namespaces.ENUMERATE: self.enumerating.enumerate,
            namespaces.PULL: self.enumerating.pull,
            namespaces.RELEASE: self.enumerating.release,
            namespaces.SUBSCRIBE: self.subscribing.subscribe,
            namespaces.RENEW: self.subscribing.renew,
            namespaces.GET_STATUS: self.subscribing.get_status,
            namespaces.GET_STATUS_MISSPELT: self.subscribing.get_status,
            namespaces.UNSUBSCRIBE: self.subscribing.unsubscribe,
        }
        self._changes: dict[str, Action] = {
            namespaces.PUT: self.transfer.put,
            namespaces.CREATE: self.transfer.create,
            namespaces.DELETE: self.transfer.delete,
        }

    def opened(
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
        await self.subscribing.open.close()

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
            request.method()  # refuses an action that is none
            action = self.transfer.invoke
        if changes and call.caller.role == roles.Role.VIEWER:
            raise errors.Forbidden(f"{call.caller.name} may look and change nothing")
        try:
            async with asyncio.timeout(read.timeout_s or wsman_request.TIMEOUT_S):
                body, more = await action(request)
        except TimeoutError as error:
            raise errors.TimedOut("it was not done in time; it may be done yet") from error
        return endpoint.SoapResponse(
            body,
            [*read.addressing.reply_headers(f"{read.action}Response"), *more],
            bytes_max=read.bytes_max,
            too_large=faults.encoding(
                f"the answer is longer than {read.bytes_max} bytes",
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
