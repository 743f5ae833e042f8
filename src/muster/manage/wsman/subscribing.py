"""WS-Eventing: subscriptions made, renewed and ended."""

from __future__ import annotations

from collections.abc import Callable

from muster.manage.wsman import asking, enumeration, eventing, faults, filters, headers, names
from muster.soap import addressing, datatypes, xml


class Subscribing:
    def __init__(self, subscriptions: eventing.Subscriptions, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.open = subscriptions

    async def subscribe(self, request: asking.Request) -> asking.Told:
        asked, now_s = request.element(names.WSE("Subscribe")), self._now_s()
        request.only_resources()
        delivery = asked.find(names.WSE("Delivery"))
        if delivery is None:
            raise faults.schema("the Delivery is missing")
        mode = delivery.get("Mode") or names.PUSH
        if mode not in (names.PUSH, names.PUSH_WITH_ACK):
            raise faults.fault(
                names.WSE("DeliveryModeRequestedUnavailable"),
                f"no delivery mode {mode[:120]!r}",
                more=[
                    xml.Element(names.WSE("SupportedDeliveryMode"), one)
                    for one in (names.PUSH, names.PUSH_WITH_ACK)
                ],
            )
        for holder, name, detail in (
            (delivery, "Heartbeats", "Heartbeats"),
            (delivery, "ConnectionRetry", "DeliveryRetries"),
            (asked, "Bookmark", "Bookmarks"),
            (asked, "SendBookmarks", "Bookmarks"),
        ):
            if holder.find(names.WSMAN(name)) is not None:
                raise faults.unsupported(f"{name} is not offered", detail)
        notify_to, end_to = delivery.find(names.WSE("NotifyTo")), asked.find(names.WSE("EndTo"))
        if notify_to is None:
            raise faults.schema("NotifyTo is missing")
        if request.selectors:
            headers.check_selectors(request.selectors)
        ends_at_s = self._subscription_ends_at_s(asked, now_s)
        subscription = eventing.Subscription(
            user=request.caller.name,
            notify_to=addressing.Endpoint.read(notify_to),
            end_to=addressing.Endpoint.read(end_to) if end_to is not None else None,
            mode=mode,
            location=request.call.location,
            ends_at_s=ends_at_s,
        )
        await self.open.begin(
            request.caller,
            subscription,
            list(request.selectors.values()),
            filters.of_subscription(asked),
            ends_at_s - now_s,
        )
        granted = asking.granted(asked.find(names.WSE("Expires")), ends_at_s, now_s)
        return asking.told(
            xml.Element(
                names.WSE("SubscribeResponse"),
                subscription.manager(),
                xml.Element(names.WSE("Expires"), granted),
            )
        )

    async def renew(self, request: asking.Request) -> asking.Told:
        asked, now_s = request.element(names.WSE("Renew")), self._now_s()
        found = self._subscription(request)
        ends_at_s = self._subscription_ends_at_s(asked, now_s)
        if found is None or not self.open.renew(found, ends_at_s - now_s):
            raise faults.fault(
                names.WSE("UnableToRenew"), "no such subscription: it has ended", blame=faults.RECEIVER
            )
        found.ends_at_s = ends_at_s
        granted = asking.granted(asked.find(names.WSE("Expires")), found.ends_at_s, now_s)
        return asking.told(
            xml.Element(names.WSE("RenewResponse"), xml.Element(names.WSE("Expires"), granted))
        )

    async def get_status(self, request: asking.Request) -> asking.Told:
        request.element(names.WSE("GetStatus"))
        found = self._subscription(request)
        if found is None:
            raise faults.parameter("no such subscription: it has ended")
        granted = xml.Element(names.WSE("Expires"), datatypes.moment(found.ends_at_s))
        return asking.told(xml.Element(names.WSE("GetStatusResponse"), granted))

    async def unsubscribe(self, request: asking.Request) -> asking.Told:
        request.element(names.WSE("Unsubscribe"))
        found = self._subscription(request)
        if found is None:
            raise faults.parameter("no such subscription: it has ended")
        await self.open.end(found)
        return asking.told()

    def _subscription(self, request: asking.Request) -> eventing.Subscription | None:
        if not request.headers.subscription:
            raise faults.fault(names.WSE("InvalidMessage"), "the header wse:Identifier is missing")
        return self.open.find(request.headers.subscription, request.caller.name)

    @staticmethod
    def _subscription_ends_at_s(asked: xml.Element, now_s: float) -> float:
        return enumeration.ends_at_s(
            asked, names.WSE, now_s, default_s=eventing.LIFETIME_S, max_s=eventing.LIFETIME_S_MAX
        )
