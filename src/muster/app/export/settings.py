"""The section of the settings for the export of the activity log."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib import parse

from muster.core import errors
from muster.core.settings import sections

doc = sections.field_doc

PORTS = {"udp": 514, "tcp": 601, "tls": 6514}


class SyslogSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Export of the activity log to a syslog server (RFC 5424)."""

    url: Annotated[
        str,
        doc(
            "The server: udp://HOST:PORT, tcp://HOST:PORT or tls://HOST:PORT. Empty: no export. Over udp "
            "entries can be lost, and over udp and tcp they are not encrypted."
        ),
    ] = ""
    facility: Annotated[
        Literal[
            "user", "daemon", "auth", "authpriv", "audit",
            "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7",
        ],
        doc("The facility of the entries."),
    ] = "auth"  # fmt: skip
    ca: Annotated[
        sections.FilePath, doc("Certificate authority of the server, if it is not one of the system's.")
    ] = ""

    def __post_init__(self) -> None:
        if self.url:
            server_of(self.url)


def server_of(url: str) -> tuple[str, str, int]:
    """Transport, host and port."""
    try:
        parts = parse.urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise errors.InvalidInput(f"url: {url!r}: {error}") from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise errors.InvalidInput(f"url: {url!r} is not udp://HOST:PORT, tcp://HOST:PORT or tls://HOST:PORT")
    return parts.scheme, parts.hostname, port
