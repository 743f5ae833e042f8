"""A door: HTTP questions in, SOAP answers out.

    async def handle(call: door.Call) -> door.Answer:
        ...
    made = door.Door("context", handle, authenticate=check)

A door decides nothing about its service.  It refuses what is not HTTP, SOAP or XML as it should be, finds out
who asks, sees that every header that must be understood is, hands the rest to the service's handler within a
deadline, and writes what comes back, or the fault.  Whatever is refused is counted by its reason
(``soap_refused``).

Basic authentication sends the password with each request: `authenticate` has to be quick for one it knows.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from muster.core import errors, log, metrics
from muster.soap import addressing, envelope, faults, xml

events = log.Events("soap")

TIMEOUT_S = 60.0
_MEDIA = {"text/xml", "application/soap+xml", "application/xml"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and in which role (see `muster.trust.roles`)."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, read."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    location: str = ""  # the address that it was sent to, without the query


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler gets. ``caller`` is None where the door, or this message, needs none."""

    envelope: envelope.Envelope
    addressing: addressing.Addressing | None
    caller: Caller | None
    action: str  # of HTTP: the SOAPAction header, or the action of the content type
    path: str
    location: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``bytes_max``: an envelope that would be longer is not sent; ``too_large`` is, in its place."""

    body: Sequence[xml.Element] = ()
    headers: Sequence[xml.Element] = ()
    bytes_max: int | None = None
    too_large: faults.Fault | None = None
    accepted: bool = False  # the answer goes elsewhere: 202, and nothing in it


Handler = Callable[[Call], Awaitable[Answer]]
Authenticate = Callable[[str, str], Awaitable[Caller]]
Document = Callable[[str], bytes]  # from the door's address


def _no_headers(_: Call | None, __: faults.Fault) -> Sequence[xml.Element]:
    return ()


@dataclass(kw_only=True)
class Door:
    """What differs between doors.

    ``authenticate`` None: everybody may come in, and the service looks after tokens itself.  ``is_open``
    tells of a message whether it needs no login where others do.  ``documents`` by query (``wsdl``).
    """

    name: str
    handle: Handler
    versions: Sequence[envelope.Version] = tuple(envelope.Version)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    authenticate: Authenticate | None = None
    is_open: Callable[[envelope.Envelope], bool] | None = None
    understood: Callable[[str], bool] = addressing.understood
    fault_of: Callable[[errors.MusterError], faults.Fault] = faults.of
    fault_headers: Callable[[Call | None, faults.Fault], Sequence[xml.Element]] = _no_headers
    documents: Mapping[str, Document] = field(default_factory=dict)
    limits: xml.Limits = field(default_factory=xml.Limits)
    timeout_s: float = TIMEOUT_S
    measure: metrics.Metrics = field(default_factory=metrics.Metrics)

    def __post_init__(self) -> None:
        self._answered = self.measure.counter("soap_answers", "SOAP requests that were done.", ("door",))
        self._refused = self.measure.counter(
            "soap_refused", "SOAP requests that were refused, by reason.", ("door", "reason")
        )

    async def respond(self, request: Request) -> Response:
        if request.method in ("GET", "HEAD"):
            return self._document(request)
        if request.method != "POST":
            return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "method", headers={"Allow": "GET, HEAD, POST"})
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            return self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-encoding")
        media, parameters = _content_type(request.headers.get("content-type", ""))
        if media not in _MEDIA:
            return self._refuse(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type", "send text/xml or application/soap+xml\n"
            )
        version = self._likely(media)
        call: Call | None = None
        try:
            caller = await self._caller(request)
            if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
                raise xml.Malformed("only UTF-8 is read here", reason="charset")
            root = xml.parse(request.body, self.limits)
            version = envelope.version_of(root) or version
            message = envelope.read(root, self.versions)
            if (
                caller is None
                and self.authenticate is not None
                and not (self.is_open and self.is_open(message))
            ):
                raise errors.Unauthorized("this needs a name and a password")
            action = (request.headers.get("soapaction") or parameters.get("action", "")).strip().strip('"')
            call = Call(message, addressing.read(message), caller, action, request.path, request.location)
            envelope.check_understood(message, self.understood)
            return await self._answer(call)
        except errors.Unauthorized as error:
            return self._refuse(
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                f"{error.message}\n",
                headers={"WWW-Authenticate": 'Basic realm="muster", charset="UTF-8"'},
            )
        except errors.MusterError as error:
            if isinstance(error, errors.InvariantBroken):
                events.error("bug", door=self.name, error=error)
            return self._fault(version, call, error)
        except Exception as error:  # noqa: BLE001  (a bug of ours is a fault too, and the log has it)
            events.error("bug", door=self.name, error=error)
            return self._fault(version, call, errors.InvariantBroken(str(error)))

    def too_large(self, headers: Mapping[str, str]) -> Response:
        """To a body that was not read, because it is longer than any that the door takes."""
        error = errors.LimitExceeded(f"the message is longer than {self.limits.bytes} bytes")
        return self._fault(self._likely(_content_type(headers.get("content-type", ""))[0]), None, error)

    def _likely(self, media: str) -> envelope.Version:
        """The version of an answer to what could not be read."""
        wanted = envelope.Version.V12 if media == "application/soap+xml" else envelope.Version.V11
        return wanted if wanted in self.versions else self.versions[0]

    def _document(self, request: Request) -> Response:
        made = self.documents.get(request.query.lower())
        if made is None:
            there = ", ".join(f"?{one}" for one in self.documents)
            return self._refuse(
                HTTPStatus.NOT_FOUND if request.query else HTTPStatus.METHOD_NOT_ALLOWED,
                "no-document",
                f"this is a SOAP door: POST to it{f', or read {there}' if there else ''}\n",
                headers={"Allow": "POST"},
            )
        body = made(request.location) if request.method == "GET" else b""
        return Response(HTTPStatus.OK, body, "text/xml; charset=utf-8")

    async def _caller(self, request: Request) -> Caller | None:
        """Whoever the request says it is from; a wrong name is refused even where none is needed."""
        given = request.headers.get("authorization")
        if self.authenticate is None:
            return None
        if given is None:
            if self.is_open is None:
                raise errors.Unauthorized("this door needs a name and a password")
            return None
        scheme, _, token = given.partition(" ")
        try:
            if scheme.lower() != "basic":
                raise ValueError(scheme)
            name, colon, password = base64.b64decode(token.strip(), validate=True).decode().partition(":")
            if not colon:
                raise ValueError("no colon")
        except (ValueError, binascii.Error) as error:
            raise errors.Unauthorized("only Basic authentication is taken here") from error
        return await self.authenticate(name, password)

    async def _answer(self, call: Call) -> Response:
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.handle(call)
        except TimeoutError as error:
            raise errors.TimedOut(f"it was not done in {self.timeout_s:g} s") from error
        if answer.accepted:
            self._answered.add(door=self.name)
            return Response(HTTPStatus.ACCEPTED)
        version = call.envelope.version
        body = envelope.write(version, answer.body, answer.headers, self.prefixes)
        if answer.bytes_max is not None and len(body) > answer.bytes_max:
            raise answer.too_large or errors.LimitExceeded(f"the answer has over {answer.bytes_max} bytes")
        self._answered.add(door=self.name)
        return Response(HTTPStatus.OK, body, version.content_type)

    def _fault(self, version: envelope.Version, call: Call | None, error: errors.MusterError) -> Response:
        fault = self.fault_of(error)
        reason = error.reason if isinstance(error, xml.Malformed) else fault.reason_word
        self._refused.add(door=self.name, reason=reason)
        body = envelope.write_fault(version, fault, self.fault_headers(call, fault), self.prefixes)
        theirs = version is envelope.Version.V12 and fault.blame is faults.Code.SENDER
        status = HTTPStatus.BAD_REQUEST if theirs else HTTPStatus.INTERNAL_SERVER_ERROR
        return Response(status, body, version.content_type)

    def _refuse(
        self, status: int, reason: str, text: str = "", *, headers: Mapping[str, str] | None = None
    ) -> Response:
        self._refused.add(door=self.name, reason=reason)
        return Response(status, text.encode(), headers=headers or {})


def _content_type(text: str) -> tuple[str, dict[str, str]]:
    media, *rest = text.split(";")
    parameters = {}
    for one in rest:
        name, _, value = one.partition("=")
        parameters[name.strip().lower()] = value.strip().strip('"')
    return media.strip().lower(), parameters
