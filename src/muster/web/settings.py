"""The section ``web`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated

from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import sections

doc = sections.field_doc


class WebSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The dashboard and the REST API, in a separate process that starts with the domain."""

    enabled: Annotated[bool, doc("Start it with the domain. Needs the extra `web`.")] = True
    host: Annotated[
        str, doc("Address to listen on. Other addresses than loopback need `cert` and `key`.")
    ] = "127.0.0.1"
    port: Annotated[
        hosts.Port,
        doc("Port to listen on. 0: a free port. If the port is in use, a free one is used and logged."),
    ] = 8480
    names: Annotated[
        tuple[str, ...],
        doc(
            "Host names for browsers, besides `host` and loopback. Requests for other names are rejected, to "
            "prevent DNS rebinding."
        ),
    ] = ()
    forwarded_header: Annotated[
        str,
        doc(
            "Header in which a proxy passes the client's address, such as X-Forwarded-For; its last entry is "
            "used to throttle failed logins. Empty: the peer of the connection is used. Set it only if every "
            "request comes through that proxy, since clients can send the header too."
        ),
    ] = ""
    cert: Annotated[sections.FilePath, doc("Server certificate in PEM; enables https.")] = ""
    key: Annotated[sections.FilePath, doc("Its private key.")] = ""
    session_s: Annotated[
        float,
        doc(
            "Lifetime of a session. Shorter: a stolen cookie is useful for less time; longer: fewer logins.",
            ge=60,
        ),
    ] = 12 * 3600.0
    token_s: Annotated[
        float, doc("Lifetime of a bearer token for REST, unless the request asks for less.", ge=60)
    ] = 30 * 86400.0

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise errors.InvalidInput("web.cert and web.key must be set together")
        if not hosts.is_loopback(self.host) and not self.cert:
            raise errors.InvalidInput(
                f"web.host {self.host} is not loopback: without TLS, passwords would be sent unencrypted",
                hint="set web.cert and web.key, or use a TLS proxy in front of loopback",
            )
