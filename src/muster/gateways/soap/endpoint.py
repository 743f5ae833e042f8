"""A SOAP endpoint: HTTP requests in, SOAP responses out.

    async def handle(request: endpoint.SoapRequest) -> endpoint.SoapResponse:
        ...
    made = endpoint.SoapEndpoint(name="context", handle=handle, authenticate=check)

An endpoint contains nothing specific to a service.  It rejects invalid HTTP, SOAP and XML, authenticates the
caller, checks the headers that must be understood, calls the handler of the service with a deadline, and
writes the response or the fault.  Rejected requests are counted by reason (``soap_refused``).

With Basic authentication every request has a password: `authenticate` has to be fast for known ones.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from muster.bus.http import server
from muster.bus.rpc import origin
from muster.core import errors
from muster.core.formats import xml
from muster.core.telemetry import log, metrics
from muster.gateways.soap import addresses, envelope, faults
from muster.trust.login import passwords

events = log.EventLog("soap")

TIMEOUT_S = 60.0
ANONYMOUS = xml.XmlLimits(bytes=32 << 10, depth=32, elements=1000)
RESPONSE_BYTES_MAX = 8 << 20
FAULT_BYTES_MAX = 32 << 10
INLINE_BYTES_MAX = 16 << 10  # a longer message is parsed in a thread
PARSERS_MAX = 2
_DECLARED = re.compile(rb"(?:\xef\xbb\xbf)?<\?xml[^>]{0,99}?\sencoding\s*=\s*[\"']([\w.\-]{1,40})[\"']")
_MEDIA = {"text/xml", "application/soap+xml", "application/xml"}


@dataclass(frozen=True, slots=True)
class SoapHttpRequest:
    """An HTTP request."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    location: str = ""  # the requested URL without the query
    address: str = "-"  # the client's


@dataclass(slots=True)
class AdmittedRequest:
    """A request whose body may be read, and the limits of the body."""

    caller: passwords.PasswordLogin | None
    limits: xml.XmlLimits
    is_anonymous: bool


@dataclass(frozen=True, slots=True)
class SoapRequest:
    """The input of a handler. ``caller`` is None if the endpoint or the message needs no login."""

    envelope: envelope.SoapEnvelope
    addressing: addresses.Addressing | None
    caller: passwords.PasswordLogin | None
    action: str  # the SOAPAction header, or the action of the content type
    path: str
    location: str
    address: str = "-"  # the client's


@dataclass(frozen=True, slots=True)
class SoapResponse:
    """``bytes_max``: if the envelope would be longer, ``too_large`` is sent instead."""

    body: Sequence[xml.XmlElement] = ()
    headers: Sequence[xml.XmlElement] = ()
    bytes_max: int | None = None
    too_large: faults.SoapFault | None = None
    accepted: bool = False  # the response is sent elsewhere: reply 202 without a body


Handler = Callable[[SoapRequest], Awaitable[SoapResponse]]
#: From a name, a password and the client's address.
Authenticate = Callable[[str, str, str], Awaitable[passwords.PasswordLogin]]
#: Whether the account still has its password and role.
LoginCheck = Callable[[passwords.PasswordLogin], Awaitable[bool]]
DetectLogin = Callable[[bytes], Awaitable[bool]]
Document = Callable[[str], bytes]  # from the URL of the endpoint


async def always_current(_: passwords.PasswordLogin) -> bool:
    """The check of logins that never change."""
    return True


def _no_headers(_: SoapRequest | None, __: faults.SoapFault) -> Sequence[xml.XmlElement]:
    return ()


@dataclass(kw_only=True)
class SoapEndpoint:
    """What differs between endpoints.

    ``authenticate`` None: no login, or the service handles tokens itself.  ``is_open`` returns whether a
    message needs no login although others do.  ``documents`` by query (``wsdl``).

    A client without a login may send what the limits ``anonymous`` allow.  If the login is inside the
    message, ``detect_login`` looks for it in the first bytes, and decides whether the rest is read.
    """

    name: str
    handle: Handler
    versions: Sequence[envelope.SoapVersion] = tuple(envelope.SoapVersion)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    authenticate: Authenticate | None = None
    is_open: Callable[[envelope.SoapEnvelope], bool] | None = None
    understood: Callable[[str], bool] = addresses.understood
    fault_of: Callable[[errors.MusterError], faults.SoapFault] = faults.from_error
    fault_headers: Callable[[SoapRequest | None, faults.SoapFault], Sequence[xml.XmlElement]] = _no_headers
    documents: Mapping[str, Document] = field(default_factory=dict)
    limits: xml.XmlLimits = field(default_factory=xml.XmlLimits)
    anonymous: xml.XmlLimits = ANONYMOUS
    detect_login: DetectLogin | None = None
    bytes_max: int = RESPONSE_BYTES_MAX  # of a response
    fault_bytes_max: int = FAULT_BYTES_MAX
    timeout_s: float = TIMEOUT_S
    measure: metrics.Metrics = field(default_factory=metrics.Metrics)

    def __post_init__(self) -> None:
        self._parsing = asyncio.Semaphore(PARSERS_MAX)
        self._succeeded = self.measure.counter("soap_answers", "SOAP requests that succeeded.", ("endpoint",))
        self._rejected = self.measure.counter(
            "soap_refused", "SOAP requests that were rejected, by reason.", ("endpoint", "reason")
        )

    async def admit(self, request: SoapHttpRequest) -> AdmittedRequest | server.HttpResponse:
        """Decide by the headers alone whether the body of a request is read."""
        if request.method in ("GET", "HEAD"):
            return AdmittedRequest(None, self.anonymous, True)
        if request.method != "POST":
            return self._reject(HTTPStatus.METHOD_NOT_ALLOWED, "method", headers={"Allow": "GET, HEAD, POST"})
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            return self._reject(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-encoding")
        media, _ = _content_type(request.headers.get("content-type", ""))
        if media not in _MEDIA:
            return self._reject(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type", "send text/xml or application/soap+xml\n"
            )
        try:
            caller = await self._caller(request)
        except errors.Unauthorized as error:
            return self._unauthorized(error)
        except errors.Overloaded as error:
            self._rejected.add(endpoint=self.name, reason="throttled")
            return busy(error, HTTPStatus.TOO_MANY_REQUESTS)
        except errors.MusterError as error:  # for example, the file of an account cannot be read
            return self._fault(self._fallback_version(media), None, error)
        return AdmittedRequest(caller, self.anonymous if caller is None else self.limits, caller is None)

    async def admit_large(self, start: bytes, admitted: AdmittedRequest) -> bool:
        """Whether a message beyond the anonymous limits contains a login and may be read.

        ``start`` is its beginning.
        """
        if not admitted.is_anonymous or self.detect_login is None:
            return False
        if not await self.detect_login(start[: self.anonymous.bytes]):
            return False
        admitted.is_anonymous, admitted.limits = False, self.limits
        return len(start) <= self.limits.bytes

    async def process(self, request: SoapHttpRequest, admitted: AdmittedRequest) -> server.HttpResponse:
        if request.method in ("GET", "HEAD"):
            return self._document(request)
        media, parameters = _content_type(request.headers.get("content-type", ""))
        version = self._fallback_version(media)
        call: SoapRequest | None = None
        caller = admitted.caller
        try:
            declared = _DECLARED.match(request.body)  # counts if the client does not state it in HTTP
            charset = parameters.get("charset") or (declared[1].decode() if declared else "utf-8")
            if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
                raise xml.MalformedXml("only UTF-8 is supported", reason="charset")
            root = await self._parse(request.body, admitted.limits)
            version = envelope.version_of(root) or version
            message = envelope.read(root, self.versions)
            if (
                caller is None
                and self.authenticate is not None
                and not (self.is_open and self.is_open(message))
            ):
                raise errors.Unauthorized("this message needs a name and a password")
            action = (request.headers.get("soapaction") or parameters.get("action", "")).strip().strip('"')
            call = SoapRequest(
                message,
                addresses.read(message),
                caller,
                action,
                request.path,
                request.location,
                request.address,
            )
            envelope.check_understood(message, self.understood)
            return await self._invoke(call)
        except errors.Unauthorized as error:
            return self._unauthorized(error)
        except errors.MusterError as error:
            if isinstance(error, errors.InvariantViolation):
                events.error("bug", endpoint=self.name, error=error)
            return self._fault(version, call, error)
        except Exception as error:  # noqa: BLE001  (report bugs as faults, and log them)
            events.error("bug", endpoint=self.name, error=error)
            return self._fault(version, call, errors.InvariantViolation(str(error)))

    async def _parse(self, data: bytes, limits: xml.XmlLimits) -> xml.XmlElement:
        if len(data) <= INLINE_BYTES_MAX:
            return xml.parse(data, limits)
        async with self._parsing:
            return await asyncio.to_thread(xml.parse, data, limits)

    def _unauthorized(self, error: errors.Unauthorized) -> server.HttpResponse:
        return self._reject(
            HTTPStatus.UNAUTHORIZED,
            "unauthorized",
            f"{error.message}\n",
            headers={"WWW-Authenticate": 'Basic realm="muster", charset="UTF-8"'},
        )

    def too_large(self, headers: Mapping[str, str], admitted: AdmittedRequest) -> server.HttpResponse:
        """Respond to a body that was not read because it is too long."""
        hint = None
        if admitted.is_anonymous and self.limits.bytes > admitted.limits.bytes:
            hint = f"authenticated clients may send {self.limits.bytes} bytes"
        error = errors.LimitExceeded(f"the message is longer than {admitted.limits.bytes} bytes", hint=hint)
        return self._fault(
            self._fallback_version(_content_type(headers.get("content-type", ""))[0]), None, error
        )

    def _fallback_version(self, media: str) -> envelope.SoapVersion:
        """The version of a response to a message that could not be read."""
        version = envelope.SoapVersion.V12 if media == "application/soap+xml" else envelope.SoapVersion.V11
        return version if version in self.versions else self.versions[0]

    def _document(self, request: SoapHttpRequest) -> server.HttpResponse:
        made = self.documents.get(request.query.lower())
        if made is None:
            there = ", ".join(f"?{query}" for query in self.documents)
            return self._reject(
                HTTPStatus.NOT_FOUND if request.query else HTTPStatus.METHOD_NOT_ALLOWED,
                "no-document",
                f"this is a SOAP endpoint: use POST{f', or GET {there}' if there else ''}\n",
                headers={"Allow": "POST"},
            )
        body = made(request.location) if request.method == "GET" else b""
        return server.HttpResponse(HTTPStatus.OK, body, "text/xml; charset=utf-8")

    async def _caller(self, request: SoapHttpRequest) -> passwords.PasswordLogin | None:
        """The authenticated caller; wrong credentials are rejected even if none are needed."""
        authorization = request.headers.get("authorization")
        if self.authenticate is None:
            return None
        if authorization is None:
            if self.is_open is None:
                raise errors.Unauthorized("this endpoint needs a name and a password")
            return None
        scheme, _, token = authorization.partition(" ")
        try:
            if scheme.lower() != "basic":
                raise ValueError(scheme)
            name, colon, password = base64.b64decode(token.strip(), validate=True).decode().partition(":")
            if not colon:
                raise ValueError("no colon")
        except (ValueError, binascii.Error) as error:
            raise errors.Unauthorized("only Basic authentication is supported") from error
        return await self.authenticate(name, password, request.address)

    async def _invoke(self, call: SoapRequest) -> server.HttpResponse:
        try:
            with origin.acting(self.name, call.address):
                async with asyncio.timeout(self.timeout_s):
                    response = await self.handle(call)
        except TimeoutError as error:
            raise errors.TimedOut(f"the operation did not finish in {self.timeout_s:g} s") from error
        if response.accepted:
            self._succeeded.add(endpoint=self.name)
            return server.HttpResponse(HTTPStatus.ACCEPTED)
        version = call.envelope.version
        bytes_max = self.bytes_max if response.bytes_max is None else min(response.bytes_max, self.bytes_max)
        try:
            body = envelope.write(
                version, response.body, response.headers, self.prefixes, bytes_max=bytes_max
            )
        except errors.LimitExceeded:
            raise response.too_large or errors.LimitExceeded(
                f"the response has more than {bytes_max} bytes"
            ) from None
        self._succeeded.add(endpoint=self.name)
        return server.HttpResponse(HTTPStatus.OK, body, version.content_type)

    def _fault(
        self, version: envelope.SoapVersion, call: SoapRequest | None, error: errors.MusterError
    ) -> server.HttpResponse:
        fault = self.fault_of(error)
        reason = error.reason if isinstance(error, xml.MalformedXml) else fault.reason_word
        self._rejected.add(endpoint=self.name, reason=reason)
        headers = self.fault_headers(call, fault)
        try:
            body = envelope.write_fault(
                version, fault, headers, self.prefixes, bytes_max=self.fault_bytes_max
            )
        except errors.LimitExceeded:  # the echoed headers of the client do not fit
            small = faults.SoapFault(fault.blame, fault.message[:1000], subcode=fault.subcode)
            body = envelope.write_fault(version, small, (), self.prefixes)
        theirs = version is envelope.SoapVersion.V12 and fault.blame is faults.SoapFaultCode.SENDER
        status = HTTPStatus.BAD_REQUEST if theirs else HTTPStatus.INTERNAL_SERVER_ERROR
        return server.HttpResponse(status, body, version.content_type)

    def _reject(
        self, status: int, reason: str, text: str = "", *, headers: Mapping[str, str] | None = None
    ) -> server.HttpResponse:
        self._rejected.add(endpoint=self.name, reason=reason)
        return server.HttpResponse(status, text.encode(), headers=headers or {})


def busy(error: errors.Overloaded, status: int = HTTPStatus.SERVICE_UNAVAILABLE) -> server.HttpResponse:
    headers = {"Retry-After": str(int(error.retry_after_s or 1))}
    return server.HttpResponse(status, f"{error.message}\n".encode(), headers=headers)


def _content_type(text: str) -> tuple[str, dict[str, str]]:
    media, *rest = text.split(";")
    parameters = {}
    for parameter in rest:
        name, _, value = parameter.partition("=")
        parameters[name.strip().lower()] = value.strip().strip('"')
    return media.strip().lower(), parameters
