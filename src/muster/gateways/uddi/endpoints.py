"""The SOAP endpoints of UDDI: dispatch each message to its operation; only publishers may publish.

Each path serves the operations of its API; `/uddi` serves all three.  The paths of jUDDI are served too, so
that its clients need no change.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

from muster.core import errors
from muster.core.formats import xml
from muster.core.telemetry import metrics
from muster.gateways.soap import endpoint, envelope
from muster.gateways.uddi import auth_tokens, inquiry, publication, registry
from muster.gateways.uddi.model import faults, schema, wsdl

U = schema.UDDI
PATHS = {
    "/uddi": ("Inquiry", "Publication", "Security"),
    "/uddi/inquiry": ("Inquiry",),
    "/uddi/publication": ("Publication",),
    "/uddi/security": ("Security",),
    "/juddiv3/services/inquiry": ("Inquiry",),
    "/juddiv3/services/publish": ("Publication",),
    "/juddiv3/services/security": ("Security",),
}


class UddiEndpoints:
    def __init__(
        self,
        uddi_registry: registry.UddiRegistry,
        login: endpoint.Authenticate,
        *,
        is_current: endpoint.LoginCheck = endpoint.always_current,
        measure: metrics.Metrics | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._inquiry = inquiry.InquiryHandler(uddi_registry)
        self._publication = publication.PublicationHandler(uddi_registry, self._inquiry)
        self._login = login
        self._is_current = is_current
        self._measure = measure or metrics.Metrics()
        self._tokens = auth_tokens.AuthTokens()
        self._now_s = now_s

    def endpoints(self) -> dict[str, endpoint.SoapEndpoint]:
        """Endpoints by path, and the files that describe them."""
        files = {f"/uddi{path}": self._file(source) for path, source in wsdl.FILES.items()}
        return {path: self._endpoint(names) for path, names in PATHS.items()} | files

    def _file(self, source: pathlib.Path) -> endpoint.SoapEndpoint:
        async def handle(_: endpoint.SoapRequest) -> endpoint.SoapResponse:
            raise faults.fault(faults.UddiErrorCode.UNSUPPORTED, f"{source.name} is a document: use GET")

        return endpoint.SoapEndpoint(
            name="uddi",
            handle=handle,
            versions=(envelope.SoapVersion.V11,),
            fault_of=faults.from_error,
            documents={"": lambda _: source.read_bytes()},
            measure=self._measure,
        )

    def _endpoint(self, names: tuple[str, ...]) -> endpoint.SoapEndpoint:
        operations = {operation for name in names for operation in schema.ports()[name]}

        async def handle(call: endpoint.SoapRequest) -> endpoint.SoapResponse:
            return await self._handle(call, operations)

        def describe(location: str) -> bytes:
            root = next((location[: -len(path)] for path in PATHS if location.endswith(path)), location)
            return wsdl.wsdl(f"{root}/uddi")

        return endpoint.SoapEndpoint(
            name="uddi",
            handle=handle,
            versions=(envelope.SoapVersion.V11,),
            prefixes=schema.PREFIXES,
            fault_of=faults.from_error,
            documents={"wsdl": describe},
            detect_login=self._detect_login,
            measure=self._measure,
        )

    async def _detect_login(self, start: bytes) -> bool:
        """Detect the token, which is the first element of every message that needs one."""
        text = xml.text_at_start(start, U("authInfo"))
        try:
            return text is not None and bool(await self._publisher(text))
        except errors.MusterError:
            return False

    async def _handle(self, call: endpoint.SoapRequest, operations: set[str]) -> endpoint.SoapResponse:
        message = call.envelope.first
        if message is None or len(call.envelope.body) != 1:
            raise faults.fault(faults.UddiErrorCode.FATAL_ERROR, "the body must have one message of UDDI")
        if message.namespace != U or message.local not in operations:
            raise faults.fault(
                faults.UddiErrorCode.UNSUPPORTED, f"this endpoint has no operation {message.name[:120]!r}"
            )
        response = await self._operation(schema.validate(message), call.address)
        return endpoint.SoapResponse([response] if response is not None else [])

    async def _operation(self, message: xml.XmlElement, address: str = "-") -> xml.XmlElement | None:
        name = message.local
        if name == "get_authToken":
            return await self._get_token(message, address)
        auth_info = message.find(U("authInfo"))
        text = auth_info.text if auth_info is not None else ""
        if name == "discard_authToken":
            self._tokens.discard(text, self._now_s())
            return None
        if name in schema.ports()["Inquiry"]:
            if text:  # optional, but an invalid token is an error
                await self._publisher(text)
            result: xml.XmlElement = await getattr(self._inquiry, name)(message)
            return result
        publisher = await self._publisher(text)
        done: xml.XmlElement | None = await getattr(self._publication, name)(message, publisher)
        return done

    async def _publisher(self, text: str) -> registry.UddiPublisher:
        caller = self._tokens.caller(text, self._now_s())
        if not await self._is_current(caller):
            self._tokens.discard(text, self._now_s())
            raise faults.fault(
                faults.UddiErrorCode.AUTH_TOKEN_EXPIRED,
                "the password or the role has changed: get a new token",
            )
        return registry.UddiPublisher(caller.name, caller.role)

    async def _get_token(self, message: xml.XmlElement, address: str) -> xml.XmlElement:
        try:
            caller = await self._login(message.get("userID") or "", message.get("cred") or "", address)
        except errors.Unauthorized as error:
            raise faults.fault(faults.UddiErrorCode.UNKNOWN_USER, "wrong name or password") from error
        text = self._tokens.issue(caller, self._now_s())
        return xml.XmlElement(U("authToken"), xml.XmlElement(U("authInfo"), text))
