"""The operations of WS-Context over activities, and the faults of the standard.

The context of an operation is in the SOAP header, as in the standard.  Contents are the elements of the
client, stored unchanged.  Contents that are not XML (stored by other clients) are shown as base64 in an
element of Muster's namespace.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from muster.bus.http import client
from muster.core import errors
from muster.core.formats import xml
from muster.core.telemetry import log, metrics
from muster.gateways.soap import addresses, envelope, faults, xsd_types
from muster.gateways.soap import callbacks as callbacks_
from muster.gateways.soap import endpoint as soap_endpoint
from muster.gateways.wscontext import schema
from muster.inform import activities as inform_activities
from muster.inform import protocol
from muster.trust.login import passwords
from muster.trust.permissions import roles

events = log.EventLog("wscontext")

WSCTX, OURS = schema.WSCTX, schema.OURS
REMEMBERED_MAX = 10_000  # users with a timeout of their own
_ID = re.compile(r"(?:urn:)?(?:uuid:)?([0-9A-Za-z-]{1,64})\Z")

#: Opens the activities with the identity of the caller.
ConnectAs = Callable[[passwords.PasswordLogin], AbstractAsyncContextManager[inform_activities.Activities]]


def fault(
    name: str, reason: str, *, blame: faults.SoapFaultCode = faults.SoapFaultCode.SENDER
) -> faults.SoapFault:
    return faults.SoapFault(blame, reason, subcode=WSCTX(name), details=[xml.XmlElement(WSCTX(name), reason)])


class WsContextHandler:
    def __init__(
        self,
        connect_as: ConnectAs,
        *,
        callbacks: Sequence[str] = (),
        measure: metrics.Metrics | None = None,
        now_s: Callable[[], float] = time.time,
        post: callbacks_.HttpPost = client.post,
    ) -> None:
        self._connect_as = connect_as
        self._allowed = callbacks
        self._measure = measure or metrics.Metrics()
        self._now_s = now_s
        self._post = post
        self._timeouts_s: dict[str, float] = {}

    def endpoints(
        self, authenticate: soap_endpoint.Authenticate, path: str = "/context"
    ) -> dict[str, soap_endpoint.SoapEndpoint]:
        """Endpoints by path: the context service, and the context manager at ``…manager``."""
        manager = f"{path}manager"
        return {
            path: self._endpoint("context", authenticate, schema.SERVICE, "ContextService", manager),
            manager: self._endpoint(
                "contextmanager", authenticate, schema.MANAGER, "ContextManager", manager
            ),
        }

    def _endpoint(
        self,
        name: str,
        authenticate: soap_endpoint.Authenticate,
        operations: tuple[str, ...],
        port: str,
        manager: str,
    ) -> soap_endpoint.SoapEndpoint:
        async def handle(call: soap_endpoint.SoapRequest) -> soap_endpoint.SoapResponse:
            return await self._handle(call, operations, manager)

        return soap_endpoint.SoapEndpoint(
            name=name,
            handle=handle,
            prefixes=schema.PREFIXES,
            authenticate=authenticate,
            understood=lambda header: addresses.understood(header) or header == WSCTX("context"),
            fault_of=fault_of,
            fault_headers=_fault_headers,
            documents={"wsdl": lambda location: schema.document(operations, port, location)},
            limits=xml.XmlLimits(bytes=2 << 20),
            measure=self._measure,
        )

    async def _handle(
        self, call: soap_endpoint.SoapRequest, operations: tuple[str, ...], manager: str
    ) -> soap_endpoint.SoapResponse:
        message = call.envelope.first
        if (
            message is None
            or len(call.envelope.body) != 1
            or message.namespace != WSCTX
            or message.local not in operations
        ):
            what = f"<{message.local[:60]}>" if message is not None else "an empty body"
            raise fault(
                "generalFault", f"{what} is not an operation of this endpoint; it has {', '.join(operations)}"
            )
        wsa = call.addressing
        if wsa is None:
            return soap_endpoint.SoapResponse([await self._execute(call, message, manager)])
        if wsa.repeated:
            raise addresses.invalid_header(wsa.wsa, f"the header {wsa.repeated[0]} occurs twice")
        self._check_callbacks(wsa)
        version = call.envelope.version
        try:
            response = await self._execute(call, message, manager)
        except errors.MusterError as error:
            if wsa.replies_on_connection(fault=True):
                raise
            stated = fault_of(error)
            headers = _fault_headers(call, stated)
            await self._send(
                wsa, version, envelope.write_fault(version, stated, headers, schema.PREFIXES), fault=True
            )
            return soap_endpoint.SoapResponse(accepted=True)
        headers = wsa.reply_headers(f"{WSCTX}/{response.local}")
        if wsa.replies_on_connection():
            return soap_endpoint.SoapResponse([response], headers)
        await self._send(wsa, version, envelope.write(version, [response], headers, schema.PREFIXES))
        return soap_endpoint.SoapResponse(accepted=True)

    def _check_callbacks(self, wsa: addresses.Addressing) -> None:
        for endpoint in (wsa.reply_to, wsa.fault_to):
            if endpoint is None or endpoint.address in ("", addresses.NONE, addresses.ANONYMOUS[wsa.wsa]):
                continue
            try:
                callbacks_.check(endpoint.address, self._allowed)
            except (errors.Forbidden, errors.InvalidInput) as error:
                raise addresses.invalid_header(wsa.wsa, faults.public_message(error)) from error

    async def _send(
        self, wsa: addresses.Addressing, version: envelope.SoapVersion, data: bytes, *, fault: bool = False
    ) -> None:
        """Send the reply to the address in the request: the callback style of the standard."""
        to = wsa.endpoint(fault=fault)
        if to is None or to.address == addresses.NONE:
            return
        headers = {"Content-Type": version.content_type}
        try:
            await self._post(to.address, data, headers=headers, body_bytes_max=65536)
        except errors.MusterError as error:
            events.warning("callback-failed", address=to.address, error=error)

    async def _execute(
        self, call: soap_endpoint.SoapRequest, message: xml.XmlElement, manager: str
    ) -> xml.XmlElement:
        assert call.caller is not None
        caller, id = call.caller, _identifier(call.envelope)
        reply = WSCTX(schema.REPLIES[message.local])
        if message.local in ("setTimeout", "getTimeout"):
            if message.local == "getTimeout":
                return xml.XmlElement(reply, str(int(self._timeout_s(caller))))
            self._set_timeout(caller, message)
            return xml.XmlElement(reply)
        if caller.role == roles.Role.VIEWER and message.local in ("begin", "complete", "setContents"):
            raise errors.Forbidden(f"{caller.name} has the role viewer, which cannot make changes")
        async with self._connect_as(caller) as activities:
            match message.local:
                case "begin":
                    timeout = message.find(WSCTX("timeout"))
                    made = await activities.begin(
                        parent=id,
                        timeout_s=(_seconds(timeout) if timeout is not None else 0)
                        or self._timeout_s(caller),
                    )
                    return xml.XmlElement(reply, _context(made, call.location, manager))
                case "complete":
                    _expect(id, "noActivityFault")
                    _check_completion(message)
                    await activities.complete(id)
                    return xml.XmlElement(reply)
                case "getStatus":
                    status = (
                        await activities.status(id) if id else inform_activities.ActivityStatus.NO_ACTIVITY
                    )
                    return xml.XmlElement(reply, status.value)
                case "getContents":
                    _expect(id, "validContextExpectedFault")
                    activity = await self._existing(activities.get(id))
                    return xml.XmlElement(reply, _context(activity, call.location, manager, contents=True))
            _expect(id, "validContextExpectedFault")
            await self._existing(activities.set_contents(id, _contents(message)))
            return xml.XmlElement(reply)

    @staticmethod
    async def _existing(work: Awaitable[inform_activities.Activity]) -> inform_activities.Activity:
        try:
            return await work
        except inform_activities.UnknownActivity as error:
            raise fault("unknownContextFault", error.message) from error

    def _timeout_s(self, caller: passwords.PasswordLogin) -> float:
        return self._timeouts_s.get(caller.name, inform_activities.TIMEOUT_S)

    def _set_timeout(self, caller: passwords.PasswordLogin, message: xml.XmlElement) -> None:
        timeout = message.find(WSCTX("timeout"))
        if timeout is None:
            raise fault("generalFault", "the timeout is missing")
        seconds = _seconds(timeout)
        if not seconds:  # back to the default
            self._timeouts_s.pop(caller.name, None)
            return
        inform_activities.check_timeout(seconds)
        if len(self._timeouts_s) >= REMEMBERED_MAX and caller.name not in self._timeouts_s:
            raise errors.Overloaded("too many users have a timeout of their own")
        self._timeouts_s[caller.name] = seconds


def fault_of(error: errors.MusterError) -> faults.SoapFault:
    message = faults.public_message(error)
    match error:
        case faults.SoapFault():
            return error
        case inform_activities.ChildActivityPending():
            return fault("childActivityPendingFault", message)
        case inform_activities.InvalidActivityState():
            return fault("invalidStateFault", message)
        case inform_activities.UnknownActivity():
            return fault("invalidActivityFault", message)
        case inform_activities.ActivityTimeoutOutOfRange():
            return fault("timeoutOutOfRangeFault", message)
        case errors.Forbidden():
            return fault("noPermissionFault", message)
    plain = faults.from_error(error)
    return fault("generalFault", plain.message, blame=plain.blame)


def _fault_headers(
    call: soap_endpoint.SoapRequest | None, error: faults.SoapFault
) -> Sequence[xml.XmlElement]:
    if call is None or call.addressing is None:
        return ()
    action = f"{WSCTX}/{error.reason_word}"
    return call.addressing.reply_headers(action, fault=True)


def _identifier(message: envelope.SoapEnvelope) -> str:
    """The id of the activity in the header. Compared by local name: some clients use a wrong namespace inside
    it.
    """
    contexts = [header for header in message.headers if header.name == WSCTX("context")]
    if not contexts:
        return ""
    identifiers = [child.text for child in contexts[0].children if child.local == "context-identifier"]
    if len(contexts) > 1 or len(identifiers) != 1:
        raise fault("validContextExpectedFault", "expected one context with one context-identifier")
    match = _ID.match(identifiers[0])
    if match is None:
        raise fault(
            "validContextExpectedFault", f"{identifiers[0][:80]!r} is not an identifier of this service"
        )
    return match[1]


def _expect(id: str, name: str) -> None:
    if not id:
        raise fault(name, "the header has no context")


def _check_completion(message: xml.XmlElement) -> None:
    status = message.find(WSCTX("completion-status"))
    if status is not None and status.text not in schema.COMPLETION_STATUSES:
        allowed = ", ".join(schema.COMPLETION_STATUSES)
        raise fault("generalFault", f"{status.text[:60]!r} is not a completion status: use {allowed}")


def _seconds(element: xml.XmlElement) -> int:
    try:
        return xsd_types.parse_integer(element.text, minimum=0, maximum=1 << 31)
    except errors.InvalidInput as error:
        raise fault("timeoutOutOfRangeFault", error.message) from error


def _context(
    activity: inform_activities.Activity, location: str, manager: str, *, contents: bool = False
) -> xml.XmlElement:
    wsa = addresses.WSA05
    base = location.rpartition("/")[0]
    address = xml.XmlElement(wsa("Address"), f"{base}/{manager.rpartition('/')[2]}")
    parent = None
    if activity.parent:
        identifier = xml.XmlElement(WSCTX("context-identifier"), f"urn:uuid:{activity.parent}")
        parent = xml.XmlElement(WSCTX("parent-context"), identifier)
    return xml.XmlElement(
        WSCTX("context"),
        xml.XmlElement(WSCTX("context-identifier"), f"urn:uuid:{activity.id}"),
        xml.XmlElement(WSCTX("context-manager"), address),
        parent,
        *(_content_elements(activity.contents) if contents else ()),
        attributes={"expiresAt": xsd_types.format_datetime(activity.expires_at_ns / 1e9)},
    )


def _contents(message: xml.XmlElement) -> bytes:
    """The bytes to store: the elements unchanged, or the decoded content of a ``bytes`` element."""
    if any(child.namespace == WSCTX or not child.namespace for child in message.children) or message.text:
        raise fault("generalFault", "contents must be elements of a namespace other than that of WS-Context")
    if len(message.children) == 1 and message.children[0].name == OURS("bytes"):
        try:
            return base64.b64decode(message.children[0].text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise fault("generalFault", f"not base64: {error}") from error
    contents = b""
    for child in message.children:  # each is written with all its namespace prefixes
        contents += xml.write(child, bytes_max=protocol.VALUE_BYTES_MAX - len(contents))
    return contents


def _content_elements(contents: bytes) -> Sequence[xml.XmlElement]:
    if not contents:
        return ()
    try:
        holder = xml.parse(b"<c>" + contents + b"</c>", xml.XmlLimits(bytes=4 << 20))
    except (errors.InvalidInput, errors.LimitExceeded):
        holder = None
    if (
        holder is not None
        and not holder.text
        and all(child.namespace not in ("", WSCTX) for child in holder.children)
    ):
        return holder.children
    return [xml.XmlElement(OURS("bytes"), base64.b64encode(contents).decode())]
