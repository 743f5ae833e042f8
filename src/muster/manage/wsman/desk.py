"""The door itself: what is asked goes to whoever does it, and the answer gets its headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import muster
from muster.core import errors, metrics
from muster.manage.wsman import asking, enumerating, eventing, faults, headers, names, subscribing, transfer
from muster.soap import door, envelope, xml
from muster.trust import roles

ENVELOPE_BYTES_MAX = 512 << 10


Action = Callable[[asking.Request], Awaitable[asking.Told]]


class Desk:
    """``visit`` gives a client under the caller's identity; ``callbacks`` is where events may go."""

    def __init__(
        self,
        visit: eventing.Visit,
        *,
        callbacks: Sequence[str] = (),
        measure: metrics.Metrics | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._measure = measure or metrics.Metrics()
        subscriptions = eventing.Subscriptions(visit, callbacks, measure=self._measure)
        self.transfer = transfer.Transfer(visit)
        self.enumerating = enumerating.Enumerating(visit, now_s)
        self.subscribing = subscribing.Subscribing(subscriptions, now_s)
        # What changes nothing in the fleet, so that a viewer may ask it; then what does.
        self._reads: dict[str, Action] = {
            names.GET: self.transfer.get,
            names.ENUMERATE: self.enumerating.enumerate,
            names.PULL: self.enumerating.pull,
            names.RELEASE: self.enumerating.release,
            names.SUBSCRIBE: self.subscribing.subscribe,
            names.RENEW: self.subscribing.renew,
            names.GET_STATUS: self.subscribing.get_status,
            names.GET_STATUS_MISSPELT: self.subscribing.get_status,
            names.UNSUBSCRIBE: self.subscribing.unsubscribe,
        }
        self._changes: dict[str, Action] = {
            names.PUT: self.transfer.put,
            names.CREATE: self.transfer.create,
            names.DELETE: self.transfer.delete,
        }

    def opened(self, authenticate: door.Authenticate, *, limits: xml.Limits | None = None) -> door.Door:
        return door.Door(
            name="wsman",
            handle=self.handle,
            versions=(envelope.Version.V12,),
            prefixes=names.PREFIXES,
            authenticate=authenticate,
            is_open=headers.is_identify,
            understood=headers.understood,
            fault_of=faults.of,
            fault_headers=lambda call, fault: faults.headers(call.addressing if call else None, fault),
            limits=limits or xml.Limits(bytes=ENVELOPE_BYTES_MAX),
            fault_bytes_max=headers.ENVELOPE_BYTES_MIN,
            timeout_s=headers.TIMEOUT_S_MAX + 5,
            measure=self._measure,
        )

    async def close(self) -> None:
        await self.subscribing.open.close()

    async def handle(self, call: door.Call) -> door.Answer:
        if headers.is_identify(call.envelope):
            return door.Answer([_identity(call.location)])
        assert call.caller is not None
        read = headers.read(call, bytes_max=ENVELOPE_BYTES_MAX)
        request = asking.Request(call, read, call.caller)
        action, changes = self._reads.get(read.action), False
        if action is None:
            action, changes = self._changes.get(read.action), True
        if action is None:
            request.method()  # refuses an action that is none
            action = self.transfer.invoke
        if changes and call.caller.role == roles.Role.VIEWER:
            raise errors.Forbidden(f"{call.caller.name} may look and change nothing")
        try:
            async with asyncio.timeout(read.timeout_s or asking.TIMEOUT_S):
                body, more = await action(request)
        except TimeoutError as error:
            raise errors.TimedOut("it was not done in time; it may be done yet") from error
        return door.Answer(
            body,
            [*read.addressing.reply_headers(f"{read.action}Response"), *more],
            bytes_max=read.bytes_max,
            too_large=faults.encoding(
                f"the answer is longer than {read.bytes_max} bytes",
                "UnreportableSuccess" if changes else "MaxEnvelopeSize",
            ),
        )


def _identity(location: str) -> xml.Element:
    profile = names.BASIC_TLS if location.startswith("https:") else names.BASIC
    return xml.Element(
        names.WSMID("IdentifyResponse"),
        xml.Element(names.WSMID("ProtocolVersion"), str(names.WSMAN)),
        xml.Element(names.WSMID("ProductVendor"), "Muster"),
        xml.Element(names.WSMID("ProductVersion"), muster.__version__),
        xml.Element(
            names.WSMID("SecurityProfiles"), xml.Element(names.WSMID("SecurityProfileName"), profile)
        ),
    )
