"""What the door does with each request: one method for each action of the standard."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import muster
from muster.core import errors, metrics
from muster.manage import client
from muster.manage.wsman import (
    enumeration,
    eventing,
    faults,
    filters,
    fragments,
    headers,
    names,
    representations,
)
from muster.predicates import closure, parser
from muster.soap import addressing, datatypes, door, envelope, xml
from muster.trust import roles

ENVELOPE_BYTES_MAX = 512 << 10
ELEMENTS_MAX = 200  # in one answer
FRAME_BYTES = 4096  # what an answer holds besides its items
TIMEOUT_S = 60.0
READS = {
    names.GET_STATUS,
    names.GET_STATUS_MISSPELT,
    names.GET,
    names.ENUMERATE,
    names.PULL,
    names.RELEASE,
    names.SUBSCRIBE,
    names.RENEW,
    names.UNSUBSCRIBE,
}
_ANSWERED_WITH = "Response"
_METHODS_OURS = ("Rename",)


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
        self._visit = visit
        self._now_s = now_s
        self._measure = measure or metrics.Metrics()
        self.enumerations = enumeration.Enumerations()
        self.subscriptions = eventing.Subscriptions(visit, callbacks, measure=self._measure)
        self._actions: dict[str, Callable[[_Request], Awaitable[_Told]]] = {
            names.GET: self._get,
            names.PUT: self._put,
            names.CREATE: self._create,
            names.DELETE: self._delete,
            names.ENUMERATE: self._enumerate,
            names.PULL: self._pull,
            names.RELEASE: self._release,
            names.SUBSCRIBE: self._subscribe,
            names.RENEW: self._renew,
            names.GET_STATUS: self._get_status,
            names.GET_STATUS_MISSPELT: self._get_status,
            names.UNSUBSCRIBE: self._unsubscribe,
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
            timeout_s=headers.TIMEOUT_S_MAX + 5,
            measure=self._measure,
        )

    async def close(self) -> None:
        await self.subscriptions.close()

    async def handle(self, call: door.Call) -> door.Answer:
        if headers.is_identify(call.envelope):
            return door.Answer([_identity(call.location)])
        assert call.caller is not None
        read = headers.read(call, bytes_max=ENVELOPE_BYTES_MAX)
        request = _Request(call, read, call.caller)
        if call.caller.role == roles.Role.VIEWER and read.action not in READS:
            raise errors.Forbidden(f"{call.caller.name} may look and change nothing")
        action = self._actions.get(read.action)
        if action is None:
            action = self._invoke
            request.method()  # refuses an action that is none
        try:
            async with asyncio.timeout(read.timeout_s or TIMEOUT_S):
                body, more, answered = await action(request)
        except TimeoutError as error:
            raise errors.TimedOut("it was not done in time; it may be done yet") from error
        return door.Answer(
            body,
            [*read.addressing.reply_headers(answered or read.action + _ANSWERED_WITH), *more],
            bytes_max=read.bytes_max,
            too_large=faults.encoding(
                f"the answer is longer than {read.bytes_max} bytes",
                "MaxEnvelopeSize" if read.action in READS else "UnreportableSuccess",
            ),
        )

    # WS-Transfer

    async def _get(self, request: _Request) -> _Told:
        found = await self._read(request)
        if request.headers.fragment is not None:
            path, text = fragments.read(request.headers.fragment, request.kind)
            return _told(fragments.get(found, path, text=text), headers=[request.headers.fragment])
        return _told(found)

    async def _read(self, request: _Request) -> xml.Element:
        kind = request.kind
        headers.check_selectors(request.selectors)
        name = request.selectors["Name"]
        async with self._visit(request.caller) as fleet:
            if kind == names.RESOURCE:
                return representations.resource(await fleet.describe(name))
            rows = await (fleet.agents() if kind == names.AGENT else fleet.managers())
        for row in rows:
            if row["name"] == name:
                return representations.simple(kind, row)
        raise errors.NotFound(f"no {names.KINDS[kind].lower()} {name[:128]!r}")

    async def _put(self, request: _Request) -> _Told:
        request.only_resources()
        headers.check_selectors(request.selectors)
        name = request.selectors["Name"]
        async with self._visit(request.caller) as fleet:
            described = await fleet.describe(name)
            body = request.body
            if request.headers.fragment is not None:
                path, text = fragments.read(request.headers.fragment, request.kind)
                body = fragments.put(representations.resource(described), path, body, text=text)
            wanted, generation = representations.entry(body)
            changes = representations.changes(described, wanted)
            if changes:
                described = await self._changing(
                    fleet.put(name, generation=generation, **changes), names.WXF("InvalidRepresentation")
                )
            if wanted["name"] != name:
                described = await self._changing(
                    fleet.rename(name, wanted["name"]), names.WXF("InvalidRepresentation")
                )
        more = []
        if request.headers.wants_epr:
            reference = request.reference(described["name"], names.WSA("EndpointReference"))
            more.append(xml.Element(names.WSMAN("RequestedEPR"), reference))
        if request.headers.fragment is not None:
            return _told(headers=[request.headers.fragment, *more])
        return _told(representations.resource(described), headers=more)

    async def _create(self, request: _Request) -> _Told:
        request.only_resources()
        if request.headers.fragment is not None:
            raise faults.unsupported("a resource is created whole", "FragmentLevelAccess")
        entry, _ = representations.entry(request.body)
        selected = request.selectors.get("Name")
        if selected is not None and selected != entry["name"]:
            raise faults.selectors(
                f"the selector says {selected[:60]!r}, the body another name", "InvalidValue"
            )
        async with self._visit(request.caller) as fleet:
            described = await self._changing(fleet.create(entry), names.WXF("InvalidRepresentation"))
        return _told(request.reference(described["name"], names.WXF("ResourceCreated")))

    async def _delete(self, request: _Request) -> _Told:
        request.only_resources()
        headers.check_selectors(request.selectors)
        async with self._visit(request.caller) as fleet:
            await fleet.delete(request.selectors["Name"])
        return _told()

    @staticmethod
    async def _changing(work: Awaitable[Any], subcode: str) -> Any:
        """What is wrong with values that were given has a fault of its own."""
        try:
            return await work
        except errors.InvalidInput as error:
            raise faults.fault(subcode, faults.said_of(error), "InvalidValues") from error

    # Methods

    async def _invoke(self, request: _Request) -> _Told:
        kind, method = request.kind, request.method()
        request.only_resources()
        headers.check_selectors(request.selectors)
        name = request.selectors["Name"]
        arguments = representations.arguments(request.body, method)
        async with self._visit(request.caller) as fleet:
            if method in _METHODS_OURS:
                new = arguments.get("NewName")
                if not isinstance(new, str) or len(arguments) != 1:
                    raise faults.parameter("Rename takes one parameter, NewName", "InvalidName")
                described = await fleet.rename(name, new.strip())
                result = request.reference(described["name"], kind("Result"))
            else:
                timeout_s = request.headers.timeout_s or TIMEOUT_S
                value = await fleet.execute(name, method, arguments, timeout_s=timeout_s)
                result = representations.item("", value, kind, tag="Result")
        return _told(xml.Element(kind(f"{method}_OUTPUT"), result, xml.Element(kind("ReturnValue"), "0")))

    # WS-Enumeration

    async def _enumerate(self, request: _Request) -> _Told:
        asked, now_s = request.element(names.WSEN("Enumerate")), self._now_s()
        mode = enumeration.mode_of(asked)
        where = filters.of_enumeration(asked)
        ends_at_s = enumeration.ends_at_s(
            asked,
            names.WSEN,
            now_s,
            default_s=enumeration.LIFETIME_S,
            max_s=enumeration.LIFETIME_S_MAX,
        )
        made = self.enumerations.begin(request.caller.name, request.kind, where, mode, ends_at_s, now_s)
        items: list[xml.Element] = []
        done, more = False, []
        try:
            async with self._visit(request.caller) as fleet:
                if request.headers.wants_count:
                    more = [await self._count(fleet, made)]
                if asked.find(names.WSMAN("OptimizeEnumeration")) is not None:
                    count = enumeration.count_of(asked, names.WSMAN("MaxElements"), ELEMENTS_MAX)
                    items, done = await self._items(fleet, request, made, count)
                else:
                    count = 0
        except BaseException:
            self.enumerations.end(made)
            raise
        if done:
            self.enumerations.end(made)
        answer = xml.Element(
            names.WSEN("EnumerateResponse"),
            xml.Element(names.WSEN("Expires"), _granted(asked.find(names.WSEN("Expires")), ends_at_s, now_s)),
            xml.Element(names.WSEN("EnumerationContext"), None if done else made.id),
            xml.Element(names.WSMAN("Items"), *items) if count else None,
            xml.Element(names.WSMAN("EndOfSequence")) if done else None,
        )
        return _told(answer, headers=more)

    async def _pull(self, request: _Request) -> _Told:
        asked = request.element(names.WSEN("Pull"))
        one = self._context(request, asked)
        count = enumeration.count_of(asked, names.WSEN("MaxElements"), ELEMENTS_MAX)
        characters = asked.find(names.WSEN("MaxCharacters"))
        bytes_max = request.headers.bytes_max
        if characters is not None:
            try:
                bytes_max = min(bytes_max, FRAME_BYTES + datatypes.parse_integer(characters.text, minimum=1))
            except errors.InvalidInput as error:
                raise faults.schema(f"MaxCharacters: {error.message}") from error
        more = []
        one.pulling = True
        try:
            async with self._visit(request.caller) as fleet:
                if request.headers.wants_count:
                    more = [await self._count(fleet, one)]
                items, done = await self._items(fleet, request, one, count, bytes_max)
        finally:
            one.pulling = False
        if done:
            self.enumerations.end(one)
        answer = xml.Element(
            names.WSEN("PullResponse"),
            None if done else xml.Element(names.WSEN("EnumerationContext"), one.id),
            xml.Element(names.WSEN("Items"), *items),
            xml.Element(names.WSEN("EndOfSequence")) if done else None,
        )
        return _told(answer, headers=more)

    async def _release(self, request: _Request) -> _Told:
        self.enumerations.end(self._context(request, request.element(names.WSEN("Release"))))
        return _told()

    def _context(self, request: _Request, asked: xml.Element) -> enumeration.Enumeration:
        given = asked.find(names.WSEN("EnumerationContext"))
        if given is None:
            raise faults.schema("the EnumerationContext is missing")
        return self.enumerations.find(given.text, request.caller.name, request.kind, self._now_s())

    async def _items(
        self,
        fleet: client.Client,
        request: _Request,
        one: enumeration.Enumeration,
        count: int,
        bytes_max: int | None = None,
    ) -> tuple[list[xml.Element], bool]:
        """The next items, as many as were asked for and fit, and whether they are the last."""
        names_, whole, last = await self._next(fleet, one, count)
        room = (bytes_max or request.headers.bytes_max) - FRAME_BYTES
        items: list[xml.Element] = []
        for name, resource in zip(names_, whole, strict=True):
            if resource is not None:
                made = enumeration.item(
                    one.mode, resource, request.reference(name, names.WSA("EndpointReference"))
                )
                size = len(xml.write(made, names.PREFIXES))
                if size > room:
                    if not items:
                        raise faults.encoding(f"{name} alone has {size} bytes", "MaxEnvelopeSize")
                    return items, False
                room -= size
                items.append(made)
            one.after = name
        return items, last

    async def _next(
        self, fleet: client.Client, one: enumeration.Enumeration, count: int
    ) -> tuple[list[str], list[xml.Element | None], bool]:
        if one.kind == names.RESOURCE:
            page = await fleet.enumerate(where=one.where, after=one.after, limit=count)
            found = [row["name"] for row in page.items]
            if one.mode == enumeration.EPR:
                return found, [xml.Element("epr") for _ in found], page.next is None
            return (
                found,
                await asyncio.gather(*(_described(fleet, name) for name in found)),
                page.next is None,
            )
        rows = sorted(await _rows(fleet, one), key=lambda row: str(row["name"]))
        rows = [row for row in rows if row["name"] > one.after]
        chosen = rows[:count]
        whole: list[xml.Element | None] = [representations.simple(one.kind, row) for row in chosen]
        return [row["name"] for row in chosen], whole, len(rows) <= count

    async def _count(self, fleet: client.Client, one: enumeration.Enumeration) -> xml.Element:
        rows = await (fleet.names(where=one.where) if one.kind == names.RESOURCE else _rows(fleet, one))
        return xml.Element(names.WSMAN("TotalItemsCountEstimate"), str(len(rows)))

    # WS-Eventing

    async def _subscribe(self, request: _Request) -> _Told:
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
        await self.subscriptions.begin(
            request.caller,
            subscription,
            list(request.selectors.values()),
            filters.of_subscription(asked),
            ends_at_s - now_s,
        )
        granted = _granted(asked.find(names.WSE("Expires")), ends_at_s, now_s)
        return _told(
            xml.Element(
                names.WSE("SubscribeResponse"),
                subscription.manager(),
                xml.Element(names.WSE("Expires"), granted),
            )
        )

    async def _renew(self, request: _Request) -> _Told:
        asked, now_s = request.element(names.WSE("Renew")), self._now_s()
        found = self._subscription(request)
        if found is None:
            raise faults.fault(
                names.WSE("UnableToRenew"), "no such subscription: it has ended", blame=faults.RECEIVER
            )
        found.ends_at_s = self._subscription_ends_at_s(asked, now_s)
        self.subscriptions.renew(found, found.ends_at_s - now_s)
        granted = _granted(asked.find(names.WSE("Expires")), found.ends_at_s, now_s)
        return _told(xml.Element(names.WSE("RenewResponse"), xml.Element(names.WSE("Expires"), granted)))

    async def _get_status(self, request: _Request) -> _Told:
        request.element(names.WSE("GetStatus"))
        found = self._subscription(request)
        if found is None:
            raise faults.parameter("no such subscription: it has ended")
        granted = xml.Element(names.WSE("Expires"), datatypes.moment(found.ends_at_s))
        return _told(xml.Element(names.WSE("GetStatusResponse"), granted))

    async def _unsubscribe(self, request: _Request) -> _Told:
        request.element(names.WSE("Unsubscribe"))
        found = self._subscription(request)
        if found is None:
            raise faults.parameter("no such subscription: it has ended")
        await self.subscriptions.end(found)
        return _told()

    def _subscription(self, request: _Request) -> eventing.Subscription | None:
        if not request.headers.subscription:
            raise faults.fault(names.WSE("InvalidMessage"), "the header wse:Identifier is missing")
        return self.subscriptions.find(request.headers.subscription, request.caller.name)

    @staticmethod
    def _subscription_ends_at_s(asked: xml.Element, now_s: float) -> float:
        return enumeration.ends_at_s(
            asked, names.WSE, now_s, default_s=eventing.LIFETIME_S, max_s=eventing.LIFETIME_S_MAX
        )


#: Of an action: the answer's body, its headers, and its action where it is not the request's and "Response".
_Told = tuple[Sequence[xml.Element], Sequence[xml.Element], str]


def _told(*body: xml.Element, headers: Sequence[xml.Element] = ()) -> _Told:
    return body, headers, ""


class _Request:
    """One call, with what its headers say."""

    def __init__(self, call: door.Call, read: headers.Headers, caller: door.Caller) -> None:
        self.call = call
        self.headers = read
        self.caller = caller
        # Clients of CIM add the namespace they believe us to have.
        self.selectors = {name: text for name, text in read.selectors.items() if name != "__cimnamespace"}

    @property
    def kind(self) -> xml.Namespace:
        for kind in names.KINDS:
            if self.headers.resource == kind:
                return kind
        raise faults.unreachable(
            f"no resource {self.headers.resource[:200]!r}; there are {', '.join(names.KINDS)}",
            "InvalidResourceURI",
        )

    @property
    def body(self) -> xml.Element | None:
        if len(self.call.envelope.body) > 1:
            raise faults.schema("more than one element in the body")
        return self.call.envelope.first

    def element(self, name: str) -> xml.Element:
        if self.body is None or self.body.name != name:
            raise faults.schema(f"the body must be one <{name.rpartition('}')[2]}>")
        return self.body

    def only_resources(self) -> None:
        if self.kind != names.RESOURCE:
            raise faults.fault(
                names.WSA("ActionNotSupported"), f"{names.KINDS[self.kind].lower()}s can only be read here"
            )

    def method(self) -> str:
        """Of a custom action, ``{ResourceURI}/{Method}``."""
        before, _, method = self.headers.action.rpartition("/")
        if before != self.headers.resource or not xml.NCNAME.match(method):
            raise faults.fault(names.WSA("ActionNotSupported"), f"no action {self.headers.action[:200]!r}")
        return method

    def reference(self, name: str, tag: str) -> xml.Element:
        return representations.endpoint(self.call.location, self.kind, name, tag)


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


def _granted(asked: xml.Element | None, ends_at_s: float, now_s: float) -> str:
    """In the form that was asked in: a duration, or a moment."""
    if asked is not None and asked.text and not asked.text.startswith("P"):
        return datetime.datetime.fromtimestamp(ends_at_s, datetime.UTC).isoformat().replace("+00:00", "Z")
    return datatypes.duration(ends_at_s - now_s)


async def _described(fleet: client.Client, name: str) -> xml.Element | None:
    try:
        return representations.resource(await fleet.describe(name))
    except errors.NotFound:  # deleted meanwhile
        return None


async def _rows(fleet: client.Client, one: enumeration.Enumeration) -> list[dict[str, Any]]:
    rows = await (fleet.agents() if one.kind == names.AGENT else fleet.managers())
    if not one.where:
        return rows
    matches = closure.compile(parser.parse(one.where))
    return [row for row in rows if matches({**row.get("facts", {}), **row.get("labels", {}), **row}.get)]
