"""Export of the activity log to a syslog server.

Syslog has no acknowledgements: an entry that was on its way when a connection broke may be lost.
"""

from __future__ import annotations

import asyncio
import os
import platform
import ssl
from typing import Annotated, Literal
from urllib import parse

from muster.app.export import activity_export
from muster.core import errors, messages
from muster.core.formats import syslog
from muster.core.settings import sections

doc = sections.field_doc

CONNECT_S = 10.0
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


def to_message(entry: messages.Decision, settings: SyslogSettings, domain: str) -> bytes:
    """An entry of the activity log as a message of syslog."""
    return syslog.message(
        facility=settings.facility,
        severity=activity_export.SEVERITY.get(entry.outcome, "notice"),
        at_ms=entry.at_ms,
        host=platform.node(),
        application="muster",
        process=str(os.getpid()),
        kind=entry.what,
        data=activity_export.facts_of(entry, domain),
        text=activity_export.text_of(entry),
    )


class SyslogComponent(activity_export.ActivityExport):
    name = "syslog"

    def __init__(self, settings: SyslogSettings) -> None:
        super().__init__(settings.url)
        self._settings = settings
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._datagrams: asyncio.DatagramTransport | None = None

    async def _deliver(self, entry: messages.Decision, domain: str) -> None:
        await self._send(to_message(entry, self._settings, domain))

    async def _open(self) -> None:
        transport, host, port = server_of(self._settings.url)
        loop = asyncio.get_running_loop()
        if transport == "udp":
            self._datagrams, _ = await loop.create_datagram_endpoint(
                asyncio.DatagramProtocol, remote_addr=(host, port)
            )
            return
        tls = None
        if transport == "tls":
            tls = await asyncio.to_thread(ssl.create_default_context, cafile=self._settings.ca or None)
        async with asyncio.timeout(CONNECT_S):
            self._reader, self._writer = await asyncio.open_connection(host, port, ssl=tls)

    async def _send(self, data: bytes) -> None:
        if self._datagrams is not None:
            self._datagrams.sendto(data)
        elif self._writer is not None and self._reader is not None:
            if self._reader.at_eof():
                raise ConnectionResetError("the server closed the connection")
            self._writer.write(syslog.framed(data))
            async with asyncio.timeout(CONNECT_S):
                await self._writer.drain()

    async def _close(self) -> None:
        if self._datagrams is not None:
            self._datagrams.close()
            self._datagrams = None
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
