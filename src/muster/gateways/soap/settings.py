"""The section ``soap`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections
from muster.gateways.soap import callbacks as callbacks_

doc = sections.field_doc


class SoapSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """SOAP endpoints, in a process of their own: WS-Management at ``/wsman``, WS-Context at ``/context`` and
    UDDI v3 at ``/uddi``."""

    enabled: Annotated[bool, doc("Whether they are served with the domain.")] = False
    host: Annotated[str, doc("Address to listen on; without a certificate, a loopback one.")] = "127.0.0.1"
    port: Annotated[int, doc("Port; 0 takes a free one.", ge=0, le=65535)] = 5985
    certificate: Annotated[
        sections.FilePath, doc("Certificate (PEM) of the door; clients then use https. None: http.")
    ] = ""
    key: Annotated[sections.FilePath, doc("The certificate's private key (PEM).")] = ""
    forwarded_header: Annotated[
        str,
        doc(
            "Header in which a proxy in front states the client's address, such as X-Forwarded-For; its last "
            "entry counts. Clients are throttled by it. Empty: by the peer of the connection. Set it only if "
            "every request comes through that proxy, since clients can send the header too."
        ),
    ] = ""
    callbacks: Annotated[
        tuple[str, ...],
        doc(
            "Addresses that clients may have us call, for events and answers: http://HOST[:PORT][/PATH], "
            "https://*.DOMAIN. Whatever begins so may be called, and nothing else. None: no callbacks."
        ),
    ] = ()

    def __post_init__(self) -> None:
        for entry in self.callbacks:
            callbacks_.check_entry(entry)
