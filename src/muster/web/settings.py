"""The section ``web`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated

from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import sections

doc = sections.field_doc


class WebSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The dashboard and the REST interface: a process of its own, started with the domain."""

    enabled: Annotated[bool, doc("Whether it runs with the domain. Needs the extra `web`.")] = True
    host: Annotated[str, doc("Address to listen on. Beyond loopback it needs `cert` and `key`.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        hosts.Port,
        doc("Port to listen on. 0: a free one. If another process has it, a free one is taken and told."),
    ] = 8480
    names: Annotated[
        tuple[str, ...],
        doc(
            "Host names under which browsers may call it, besides `host` and those of loopback. A request "
            "for another name is refused, so that no foreign page can reach it by renaming itself."
        ),
    ] = ()
    forwarded_header: Annotated[
        str,
        doc(
            "Header in which a proxy in front states the client's address, such as X-Forwarded-For; its last "
            "entry counts. Failed logins are throttled by it. Empty: by the peer of the connection. Set it "
            "only if every request comes through that proxy, since clients can send the header too."
        ),
    ] = ""
    cert: Annotated[sections.FilePath, doc("Certificate of the door, in PEM; with it, https.")] = ""
    key: Annotated[sections.FilePath, doc("Its private key.")] = ""
    session_s: Annotated[
        float,
        doc("How long a login lasts. Shorter: a stolen one is of less use; longer: fewer logins.", ge=60),
    ] = 12 * 3600.0
    token_s: Annotated[float, doc("How long a bearer token for REST lasts, unless less is asked.", ge=60)] = (
        30 * 86400.0
    )

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise errors.InvalidInput("web.cert and web.key go together")
        if not hosts.is_loopback(self.host) and not self.cert:
            raise errors.InvalidInput(
                f"web.host {self.host} is not loopback: passwords would cross the network in the clear",
                hint="give web.cert and web.key, or put a proxy with TLS in front of loopback",
            )
