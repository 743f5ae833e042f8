"""Subscriptions: events of resources, pushed to an address that the settings allow.

Each subscription is a task with a bus connection of its user.  It receives the events that the user may
receive and delivers them one after the other.  It ends when it expires without a renewal, when it is
unsubscribed, when the password or the role of its user has changed, when the receiver refuses events, or when
the delivery of an event fails several times.  After a change or a failure, the address in ``EndTo`` is
notified.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from muster.bus.http import client as http_client
from muster.bus.http import server
from muster.core import errors
from muster.core.formats import xml
from muster.core.telemetry import log, metrics
from muster.gateways.soap import addresses, callbacks, envelope
from muster.gateways.soap import endpoint as soap_endpoint
from muster.gateways.wsman.wire import faults, namespaces, representations
from muster.manage import client, protocol
from muster.supervision import tasks
from muster.trust.login import passwords

events = log.EventLog("wsman")

LIFETIME_S = 600.0
LIFETIME_S_MAX = 86_400.0
OF_USER_MAX = 32
ALL_MAX = 512
ATTEMPTS = 4
CLOSE_S = 3.0
PAUSE_S = 0.5  # after the first attempt; doubles
RESPONSE_BYTES_MAX = 64 << 10

_V12 = envelope.SoapVersion.V12

#: Opens a management client with the identity of the caller.
ConnectAs = Callable[[passwords.PasswordLogin], AbstractAsyncContextManager[client.ManageClient]]


class DeliveryRefused(errors.Refused):
    """The receiver refuses further events."""


@dataclass(slots=True)
class EventSubscription:
    user: str
    notify_to: addresses.EndpointReference
    end_to: addresses.EndpointReference | None
    mode: str
    location: str
    ends_at_s: float = 0.0
    timer: asyncio.Timeout | None = None
    task: asyncio.Task[None] | None = None
    id: str = field(default_factory=lambda: f"uuid:{uuid.UUID(bytes=secrets.token_bytes(16), version=4)}")

    def manager(self) -> xml.XmlElement:
        identifier = xml.XmlElement(namespaces.WSE("Identifier"), self.id)
        return addresses.EndpointReference(self.location, [identifier]).element(
            namespaces.WSE("SubscriptionManager")
        )


class EventSubscriptions:
    def __init__(
        self,
        connect_as: ConnectAs,
        allowed: Sequence[str],
        *,
        is_current: soap_endpoint.LoginCheck = soap_endpoint.always_current,
        measure: metrics.Metrics,
        post: callbacks.HttpPost = http_client.post,
    ) -> None:
        self._connect_as = connect_as
        self._is_current = is_current
        self._allowed = allowed
        self._post = post
        self._open: dict[str, EventSubscription] = {}
        self._tasks = tasks.TaskSupervisor("WS-Eventing")
        self._delivered = measure.counter("wsman_events", "Events pushed to subscribers.")
        self._failed = measure.counter(
            "wsman_events_failed", "Events that could not be delivered.", ("reason",)
        )

    def __len__(self) -> int:
        return len(self._open)

    def check_address(self, endpoint: addresses.EndpointReference) -> None:
        try:
            callbacks.check(endpoint.address, self._allowed)
        except (errors.Forbidden, errors.InvalidInput) as error:
            raise faults.fault(
                namespaces.WSMAN("EventDeliverToUnusable"), faults.public_message(error), "UnusableAddress"
            ) from error

    async def check_resource(self, caller: passwords.PasswordLogin, name: str) -> None:
        """`errors.NotFound` if it does not exist."""
        async with self._connect_as(caller) as fleet:
            await fleet.describe(name)

    async def begin(
        self,
        caller: passwords.PasswordLogin,
        subscription: EventSubscription,
        resources: Sequence[str],
        where: str,
        lasts_s: float,
    ) -> EventSubscription:
        """Return when the subscription is active: all later events are delivered."""
        for endpoint in (subscription.notify_to, subscription.end_to):
            if endpoint is not None:
                self.check_address(endpoint)
        mine = sum(subscribed.user == caller.name for subscribed in self._open.values())
        if mine >= OF_USER_MAX or len(self._open) >= ALL_MAX:
            raise errors.Overloaded(
                f"{caller.name} has {mine} subscriptions", hint="unsubscribe some of them"
            )
        listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[subscription.id] = subscription
        subscription.task = self._tasks.spawn(
            "subscription", self._run(caller, subscription, resources, where, lasts_s, listening)
        )
        try:
            await listening
        except BaseException:
            await self._cancel(subscription)
            raise
        return subscription

    def find(self, id: str, user: str) -> EventSubscription | None:
        subscription = self._open.get(id)
        return subscription if subscription is not None and subscription.user == user else None

    def renew(self, subscription: EventSubscription, lasts_s: float) -> bool:
        """False: it is already ending."""
        assert subscription.timer is not None
        try:
            subscription.timer.reschedule(asyncio.get_running_loop().time() + lasts_s)
        except RuntimeError:
            return False
        return True

    async def end(self, subscription: EventSubscription) -> None:
        await self._cancel(subscription)

    async def close(self) -> None:
        """End all subscriptions and notify the ``EndTo`` addresses concurrently, within `CLOSE_S`."""
        ended = list(self._open.values())
        await asyncio.gather(*(self._cancel(subscription) for subscription in ended))
        notifications = [
            self._tasks.spawn(
                "end", self._notify_end(subscription, "SourceShuttingDown", "the server is closing")
            )
            for subscription in ended
            if subscription.end_to is not None
        ]
        if notifications:
            _, late = await asyncio.wait(notifications, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*notifications, return_exceptions=True)

    async def _cancel(self, subscription: EventSubscription) -> None:
        self._open.pop(subscription.id, None)
        if subscription.task is not None:
            subscription.task.cancel()
            await asyncio.gather(subscription.task, return_exceptions=True)

    async def _run(
        self,
        caller: passwords.PasswordLogin,
        subscription: EventSubscription,
        resources: Sequence[str],
        where: str,
        lasts_s: float,
        listening: asyncio.Future[None],
    ) -> None:
        try:
            async with (
                self._connect_as(caller) as fleet,
                fleet.listening(*resources, where=where) as feed,
                asyncio.timeout(lasts_s) as subscription.timer,
            ):
                listening.set_result(None)
                async for event in feed:
                    if not await self._is_current(caller):
                        raise errors.Unauthorized(f"the password or the role of {caller.name} has changed")
                    await self._deliver(subscription, event)
        except TimeoutError:
            events.info("subscription-lapsed", subscription=subscription.id, user=subscription.user)
        except errors.MusterError as error:
            if not listening.done():
                listening.set_exception(error)
                return
            events.warning("subscription-ended", subscription=subscription.id, error=error)
            self._open.pop(subscription.id, None)  # it cannot be renewed during the notification
            if not isinstance(error, DeliveryRefused):
                await self._notify_end(subscription, "DeliveryFailure", error.message)
        finally:
            self._open.pop(subscription.id, None)
            if not listening.done():  # a bug, or the endpoint is closing
                listening.cancel()

    async def _deliver(
        self, subscription: EventSubscription, event: protocol.ResourceStateChange | protocol.ResourceEvent
    ) -> None:
        try:
            action, body = representations.event(event)
        except Exception as error:  # noqa: BLE001  (agents supply events: an invalid one must not end the subscription)
            self._failed.add(reason="malformed")
            events.warning("malformed-event", resource=event.resource, error=error)
            return
        message_id = f"uuid:{uuid.uuid4()}"
        acknowledged = subscription.mode == namespaces.PUSH_WITH_ACK
        more = []
        if acknowledged:
            anonymous = addresses.EndpointReference(addresses.ANONYMOUS[namespaces.WSA])
            more = [
                anonymous.element(namespaces.WSA("ReplyTo")),
                xml.XmlElement(namespaces.WSMAN("AckRequested")),
            ]
        data = _message(subscription.notify_to, action, message_id, body, more)
        pause_s = PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = await self._send(subscription.notify_to.address, data)
                _check(response, message_id if acknowledged else "")
                self._delivered.add()
                return
            except DeliveryRefused:
                self._failed.add(reason="refused")
                raise
            except (errors.Unavailable, errors.InvalidInput) as error:
                if attempt == ATTEMPTS:
                    self._failed.add(reason="no-answer")
                    raise errors.Unavailable(
                        f"not delivered in {ATTEMPTS} attempts: {error.message}"
                    ) from error
                await asyncio.sleep(pause_s)
                pause_s *= 2

    async def _notify_end(self, subscription: EventSubscription, status: str, reason: str) -> None:
        if subscription.end_to is None:
            return
        body = xml.XmlElement(
            namespaces.WSE("SubscriptionEnd"),
            subscription.manager(),
            xml.XmlElement(namespaces.WSE("Status"), f"{namespaces.WSE}/{status}"),
            xml.XmlElement(namespaces.WSE("Reason"), reason, attributes={xml.LANG: "en"}),
        )
        data = _message(subscription.end_to, namespaces.SUBSCRIPTION_END, f"uuid:{uuid.uuid4()}", body)
        with contextlib.suppress(errors.MusterError):
            await self._send(subscription.end_to.address, data)

    async def _send(self, address: str, data: bytes) -> server.HttpResponse:
        headers = {"Content-Type": _V12.content_type}
        return await self._post(address, data, headers=headers, body_bytes_max=RESPONSE_BYTES_MAX)


def _message(
    to: addresses.EndpointReference,
    action: str,
    message_id: str,
    body: xml.XmlElement,
    more: Sequence[xml.XmlElement] = (),
) -> bytes:
    headers = [
        xml.XmlElement(namespaces.WSA("To"), to.address),
        xml.XmlElement(namespaces.WSA("Action"), action),
        xml.XmlElement(namespaces.WSA("MessageID"), message_id),
        *more,
        *to.headers(namespaces.WSA),
    ]
    return envelope.write(_V12, [body], headers, namespaces.PREFIXES)


def _check(response: server.HttpResponse, acknowledges: str) -> None:
    """Raise an error unless the event was accepted: any 2xx, and an acknowledgement if it was requested."""
    reply = None
    with contextlib.suppress(errors.MusterError):
        reply = envelope.read(xml.parse(response.body, xml.XmlLimits(bytes=RESPONSE_BYTES_MAX)))
    if reply is not None and reply.first is not None and reply.first.local == "Fault":
        codes = {str(element.qname()) for element in reply.first.walk() if element.name == _V12("Value")}
        if namespaces.WSMAN("DeliveryRefused") in codes:
            raise DeliveryRefused("the receiver refuses further events")
    if not 200 <= response.status < 300:
        raise errors.Unavailable(f"the receiver responded with {response.status}")
    if acknowledges:
        wsa = addresses.read(reply) if reply is not None else None
        relates = reply.header(namespaces.WSA("RelatesTo")) if reply is not None else None
        if wsa is None or wsa.action not in (namespaces.ACK, namespaces.ACK_MISSPELT):
            raise errors.Unavailable("the receiver sent no acknowledgement")
        if relates is None or relates.text != acknowledges:
            raise errors.Unavailable("the receiver acknowledged another message")
