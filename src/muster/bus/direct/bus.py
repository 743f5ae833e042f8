"""A bus that uses direct connections where there are some, and the broker for everything else.

    direct = bus.DirectBus(connected, peer_of)
    async with listener.DirectListener(direct, …), manager.Manager(direct): ...

A subscription serves both: what arrives on a link passes through the same queue and handler as what a broker
delivers. ``peer_of`` names the peer that a subject is for (`ANY`: each; empty: none, use the broker).

An agent that reaches no broker has links only (``bus`` is None): it sends what is for no particular manager
to any.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from muster.bus import api, message_format
from muster.bus.client import counters, received, requests, subscriptions
from muster.bus.direct import frames, link
from muster.bus.rpc import admission
from muster.core import errors, subjects
from muster.core.telemetry import log

events = log.EventLog("direct")

ANY = "*"
RETRY_S = 0.2
ROUTES_MAX = 4_096  # subjects whose handlers are known
PENDING_MAX, PENDING_BYTES_MAX = 1_024, 16 << 20  # for a handler of links only

_fallbacks: Counter[tuple[str, ...]] = Counter()


def fallbacks() -> Mapping[tuple[str, ...], int]:
    """Messages that this process sent to the broker in place of a link, or connections that it could not
    make, by reason."""
    return _fallbacks


def count_fallback(reason: str) -> None:
    _fallbacks[(reason,)] += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    pattern: str
    group: str
    subscription: subscriptions.BoundedSubscription


def _beginning(pattern: str) -> str:
    """``muster.inform.from`` of most; empty: there are wildcards in it. A peer may send on as many subjects
    as it likes, and a process may have a thousand subscriptions of other kinds."""
    levels = pattern.split(".", 3)[:3]
    return "" if len(levels) < 3 or "*" in levels or ">" in levels else ".".join(levels)


class DirectBus:
    """See `api.Bus`; what is not here is that of the bus."""

    def __init__(self, bus: api.Bus | None, identity: str, peer_of: Callable[[str], str]) -> None:
        self.identity = identity
        self.links: dict[str, link.DirectLink] = {}  # by peer, the newest
        self.refused: Counter[str] = Counter()  # messages on links that reached no handler, by reason
        self._bus = bus
        self._peer_of = peer_of
        self._routes: dict[str, list[_Route]] = {}  # by the beginning of the pattern, see `_beginning`
        self._known: dict[str, tuple[subscriptions.BoundedSubscription, ...]] = {}
        self.admission = admission.of_loop(asyncio.get_running_loop())

    def __getattr__(self, name: str) -> Any:
        if self._bus is None:
            raise AttributeError(f"{self.identity} has direct connections only, and no {name!r}")
        return getattr(self._bus, name)

    def as_bus(self) -> api.Bus:
        return cast("api.Bus", self)

    @property
    def state(self) -> api.ConnectionState:
        if self._bus is not None:
            return self._bus.state
        return api.ConnectionState.CONNECTED if self.links else api.ConnectionState.RECONNECTING

    @property
    def payload_bytes_max(self) -> int:
        return getattr(self._bus, "payload_bytes_max", api.PAYLOAD_BYTES_MAX)

    def add(self, opened: link.DirectLink) -> Callable[[], None]:
        """Use the link until the returned function is called."""
        self.links[opened.identity] = opened

        def remove() -> None:
            if self.links.get(opened.identity) is opened:
                del self.links[opened.identity]

        return remove

    # Receiving.

    async def subscribe(
        self, subject: str, *, group: str | None = None, **options: Any
    ) -> subscriptions.BoundedSubscription:
        if self._bus is None:
            return self.serve(subject, options["handler"])
        made = await self._bus.subscribe(subject, group=group, **options)
        return self._add_route(subject, group or "", cast("subscriptions.BoundedSubscription", made))

    def serve(self, subject: str, handler: api.Handler) -> subscriptions.BoundedSubscription:
        """A subscription for links only."""
        made = subscriptions.BoundedSubscription(
            subject,
            handler=handler,
            max_pending=PENDING_MAX,
            max_pending_bytes=PENDING_BYTES_MAX,
            overflow=api.OverflowPolicy.DROP_NEWEST,
            counts=counters.ConnectionCounters(None),
        )
        return self._add_route(subject, "", made)

    def _add_route(
        self, pattern: str, group: str, made: subscriptions.BoundedSubscription
    ) -> subscriptions.BoundedSubscription:
        route = _Route(pattern, group, made)
        routes = self._routes.setdefault(_beginning(pattern), [])
        routes.append(route)
        self._known.clear()

        def end() -> None:
            routes.remove(route)
            self._known.clear()

        made.on_end = end
        return made

    def deliver(self, over: link.DirectLink, frame: frames.DirectFrame) -> None:
        """A message that arrived on a link."""
        if not over.may_send(frame.subject):
            self._refuse(over, frame, "forbidden", link.FORBIDDEN)
            return
        receivers = self._known.get(frame.subject)
        if receivers is None:
            receivers = self._receivers(frame.subject)
        if not receivers:
            self._refuse(over, frame, "no-handler", link.NO_HANDLER)
        for receiver in receivers:
            message = received.ReceivedMessage(
                frame.subject, frame.reply or None, frame.data, frame.headers, over
            )
            receiver.accept(message)

    def _receivers(self, subject: str) -> tuple[subscriptions.BoundedSubscription, ...]:
        """As a broker: all subscriptions, but one of each group."""
        by_group = {
            route.group or id(route): route.subscription
            for beginning in (_beginning(subject), "")
            for route in self._routes.get(beginning, ())
            if subjects.matches(route.pattern, subject)
        }
        if len(self._known) >= ROUTES_MAX:
            self._known.clear()
        self._known[subject] = made = tuple(by_group.values())
        return made

    def _refuse(self, over: link.DirectLink, frame: frames.DirectFrame, reason: str, status: bytes) -> None:
        """A broker would do this at its own cost: the peer pays here, and a flood ends its connection."""
        if not self.refused[reason]:
            events.warning("message-refused", reason=reason, peer=over.identity, subject=frame.subject[:200])
        self.refused[reason] += 1
        now_s = asyncio.get_running_loop().time()
        if self.admission.wait_s(over.identity, now_s):
            over.close(f"too many messages that it may not send or that have no handler here ({reason})")
            return
        self.admission.charge(over.identity, admission.REQUEST, now_s)
        if frame.reply:
            over.send(frame.reply, b"", "", status)

    # Sending.

    def _link_for(self, subject: str) -> link.DirectLink | None:
        peer = self._peer_of(subject)
        if self._bus is None and not peer:
            peer = ANY
        if peer != ANY:
            chosen = self.links.get(peer)
        else:
            links = self.links.values()
            chosen = next((each for each in links if each.is_responsive), next(iter(links), None))
        if chosen is not None and not chosen.is_responsive and self._bus is not None:
            count_fallback("silent")
            return None
        return chosen

    async def publish(
        self, subject: str, data: bytes, *, headers: api.Headers | None = None, reply: str | None = None
    ) -> None:
        over = self._link_for(subject) if reply is None else None
        if over is not None:
            try:
                if over.send(subject, data, "", message_format.raw_headers(headers)):
                    await over.ease()
                return
            except errors.Unavailable:
                count_fallback("ended")
        await self._broker(subject).publish(subject, data, headers=headers, reply=reply)

    def publish_now(self, messages: Sequence[tuple[str, bytes, api.Headers]]) -> bool:
        """Over the broker: it keeps the order of the messages."""
        return self._broker(messages[0][0]).publish_now(messages)

    def _broker(self, subject: str) -> api.Bus:
        if self._bus is None:
            raise errors.NotConnected(
                f"{self.identity} has no direct connection for {subject}, and no broker"
            )
        return self._bus

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: api.Headers | None = None,
        timeout_s: float = api.DEFAULT_TIMEOUT_S,
        repeat: api.Repetition | None = None,
    ) -> api.Message:
        over = self._link_for(subject)
        if over is None:
            return await self._broker(subject).request(
                subject, data, headers=headers, timeout_s=timeout_s, repeat=repeat
            )
        wait_s = timeout_s if repeat is None else min(timeout_s, repeat.after_s)
        due_s = asyncio.get_running_loop().time() + timeout_s
        try:
            reply, answer = over.ask(subject, data, message_format.raw_headers(headers), wait_s)
        except errors.Unavailable as error:  # nothing was sent
            return await self._over_broker(error, subject, data, headers, timeout_s, repeat)
        try:
            return await answer
        except link.NoReplyYet as error:
            over.suspect()
            left_s = due_s - asyncio.get_running_loop().time()
            if repeat is None or left_s <= 0 or self._bus is None:
                raise errors.TimedOut(f"no reply to {subject}: {error}; it may have been done") from None
            return await self._repeat(over, reply, subject, data, headers, left_s, repeat)
        except requests.NoResponders as error:  # it was not executed
            return await self._over_broker(error, subject, data, headers, timeout_s, repeat)
        finally:
            over.forget(reply, answer, wait_s)

    async def _over_broker(
        self,
        error: errors.Unavailable,
        subject: str,
        data: bytes,
        headers: api.Headers | None,
        timeout_s: float,
        repeat: api.Repetition | None,
    ) -> api.Message:
        """A request that the peer has not executed."""
        if self._bus is None:
            raise error
        count_fallback("no-handler" if isinstance(error, requests.NoResponders) else "unsent")
        return await self._bus.request(subject, data, headers=headers, timeout_s=timeout_s, repeat=repeat)

    async def _repeat(
        self,
        over: link.DirectLink,
        reply: str,
        subject: str,
        data: bytes,
        headers: api.Headers | None,
        left_s: float,
        repeat: api.Repetition,
    ) -> api.Message:
        """Repeat a request over the broker. The first reply counts, on whichever way it comes."""
        count_fallback("late" if over.is_open else "ended")
        answer = over.ask_on(reply)
        repeated = asyncio.ensure_future(
            self._request_again(
                repeat.subject or subject,
                data if repeat.data is None else repeat.data,
                headers,
                left_s,
                repeat,
            )
        )
        try:
            ways: set[asyncio.Future[Any]] = {answer, repeated}
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and answer.exception() is None:
                return answer.result()
            return await repeated
        finally:
            if not repeated.cancel() and not repeated.cancelled():
                repeated.exception()  # the other way was faster

    async def _request_again(
        self, subject: str, data: bytes, headers: api.Headers | None, left_s: float, repeat: api.Repetition
    ) -> api.Message:
        """As a repetition of the bus: no subscriber is no reply, since the first attempt may be executed."""
        now_s = asyncio.get_running_loop().time
        due_s = now_s() + left_s
        later = api.Repetition(min(api.REPEAT_S_MAX, 2 * repeat.after_s))
        while True:
            try:
                return await self._broker(subject).request(
                    subject, data, headers=headers, timeout_s=max(0.1, due_s - now_s()), repeat=later
                )
            except errors.TimedOut:
                raise
            except errors.Unavailable as error:
                if now_s() + RETRY_S >= due_s:
                    raise errors.TimedOut(f"{error}; the first attempt may have been executed") from error
                await asyncio.sleep(RETRY_S)
