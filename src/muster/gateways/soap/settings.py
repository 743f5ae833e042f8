"""The section ``[soap]`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated

from muster.core import errors
from muster.core.settings import sections
from muster.gateways.soap import callbacks as callbacks_

doc = sections.field_doc


class SoapSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """SOAP endpoints in a separate process: WS-Management at ``/wsman``, WS-Context at ``/context`` and UDDI
    v3 at ``/uddi``.
    """

    enabled: Annotated[bool, doc("Serve the endpoints with the domain.")] = False
    host: Annotated[
        str, doc("Address to listen on; without a certificate, it must be a loopback address.")
    ] = "127.0.0.1"
    port: Annotated[int, doc("Port; 0: any free port.", ge=0, le=65535)] = 5985
    certificate: Annotated[sections.FilePath, doc("Certificate (PEM) for https. Empty: http.")] = ""
    key: Annotated[sections.FilePath, doc("The certificate's private key (PEM).")] = ""
    forwarded_header: Annotated[
        str,
        doc(
            "Header in which a proxy states the client's address, such as X-Forwarded-For; the last entry is "
            "used. Clients are throttled by it. Empty: by the peer address of the connection. Set it only "
            "if every request comes through that proxy, because clients can send the header too."
        ),
    ] = ""
    callbacks: Annotated[
        tuple[str, ...],
        doc(
            "Allowed callback addresses of clients, for events and replies: `http://HOST[:PORT][/PATH]`, "
            "`https://*.DOMAIN`. Addresses with this prefix are allowed. Empty: no callbacks."
        ),
    ] = ()

    def __post_init__(self) -> None:
        if self.key and not self.certificate:
            raise errors.InvalidInput("soap.key needs soap.certificate")
        for entry in self.callbacks:
            callbacks_.check_entry(entry)
