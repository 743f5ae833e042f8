"""WS-Eventing: subscribe, renew, get status, unsubscribe."""

from __future__ import annotations

from collections.abc import Callable

from muster.core.formats import xml
from muster.gateways.soap import addresses, xsd_types
from muster.gateways.wsman import enumeration_contexts, event_delivery
from muster.gateways.wsman import request as wsman_request
from muster.gateways.wsman.wire import faults, filters, headers, namespaces


class EventingHandler:
    def __init__(self, subscriptions: event_delivery.EventSubscriptions, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.subscriptions = subscriptions

    async def subscribe(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        body, now_s = request.element(namespaces.WSE("Subscribe")), self._now_s()
        request.only_resources()
        delivery = body.find(namespaces.WSE("Delivery"))
        if delivery is None:
            raise faults.schema("the Delivery is missing")
        mode = delivery.get("Mode") or namespaces.PUSH
        if mode not in (namespaces.PUSH, namespaces.PUSH_WITH_ACK):
            raise faults.fault(
                namespaces.WSE("DeliveryModeRequestedUnavailable"),
                f"unknown delivery mode {mode[:120]!r}",
                more=[
                    xml.XmlElement(namespaces.WSE("SupportedDeliveryMode"), supported_mode)
                    for supported_mode in (namespaces.PUSH, namespaces.PUSH_WITH_ACK)
                ],
            )
        for holder, name, detail in (
            (delivery, "Heartbeats", "Heartbeats"),
            (delivery, "ConnectionRetry", "DeliveryRetries"),
            (body, "Bookmark", "Bookmarks"),
            (body, "SendBookmarks", "Bookmarks"),
            (delivery, "Auth", "AuthorizationMode"),
        ):
            if holder.find(namespaces.WSMAN(name)) is not None:
                raise faults.unsupported(f"{name} is not supported", detail)
        if delivery.text_of(namespaces.WSMAN("ContentEncoding"), "UTF-8").upper() != "UTF-8":
            raise faults.encoding("events are sent in UTF-8 only", "CharacterSet")
        notify_to, end_to = delivery.find(namespaces.WSE("NotifyTo")), body.find(namespaces.WSE("EndTo"))
        if notify_to is None:
            raise faults.schema("NotifyTo is missing")
        if request.selectors:
            headers.check_selectors(request.selectors)
            await self.subscriptions.check_resource(request.caller, request.selectors["Name"])
        ends_at_s = self._subscription_ends_at_s(body, now_s)
        subscription = event_delivery.EventSubscription(
            user=request.caller.name,
            notify_to=addresses.EndpointReference.read(notify_to),
            end_to=addresses.EndpointReference.read(end_to) if end_to is not None else None,
            mode=mode,
            location=request.call.location,
            ends_at_s=ends_at_s,
        )
        await self.subscriptions.begin(
            request.caller,
            subscription,
            list(request.selectors.values()),
            filters.of_subscription(body),
            ends_at_s - now_s,
        )
        granted = wsman_request.granted_expiry(body.find(namespaces.WSE("Expires")), ends_at_s, now_s)
        return wsman_request.build_response(
            xml.XmlElement(
                namespaces.WSE("SubscribeResponse"),
                subscription.manager(),
                xml.XmlElement(namespaces.WSE("Expires"), granted),
            )
        )

    async def renew(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        body, now_s = request.element(namespaces.WSE("Renew")), self._now_s()
        subscription = self._subscription(request)
        ends_at_s = self._subscription_ends_at_s(body, now_s)
        if subscription is None or not self.subscriptions.renew(subscription, ends_at_s - now_s):
            raise faults.fault(
                namespaces.WSE("UnableToRenew"), "no such subscription: it has ended", blame=faults.RECEIVER
            )
        subscription.ends_at_s = ends_at_s
        granted = wsman_request.granted_expiry(
            body.find(namespaces.WSE("Expires")), subscription.ends_at_s, now_s
        )
        return wsman_request.build_response(
            xml.XmlElement(
                namespaces.WSE("RenewResponse"), xml.XmlElement(namespaces.WSE("Expires"), granted)
            )
        )

    async def get_status(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        request.element(namespaces.WSE("GetStatus"))
        subscription = self._subscription(request)
        if subscription is None:
            raise faults.unreachable("no such subscription: it has ended")
        granted = xml.XmlElement(namespaces.WSE("Expires"), xsd_types.format_datetime(subscription.ends_at_s))
        return wsman_request.build_response(xml.XmlElement(namespaces.WSE("GetStatusResponse"), granted))

    async def unsubscribe(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        request.element(namespaces.WSE("Unsubscribe"))
        subscription = self._subscription(request)
        if subscription is None:
            raise faults.unreachable("no such subscription: it has ended")
        await self.subscriptions.end(subscription)
        return wsman_request.build_response()

    def _subscription(self, request: wsman_request.WsManRequest) -> event_delivery.EventSubscription | None:
        if not request.headers.subscription:
            raise faults.fault(namespaces.WSE("InvalidMessage"), "the header wse:Identifier is missing")
        return self.subscriptions.find(request.headers.subscription, request.caller.name)

    @staticmethod
    def _subscription_ends_at_s(body: xml.XmlElement, now_s: float) -> float:
        return enumeration_contexts.ends_at_s(
            body,
            namespaces.WSE,
            now_s,
            default_s=event_delivery.LIFETIME_S,
            max_s=event_delivery.LIFETIME_S_MAX,
        )
