"""Export of the activity log to a syslog server.

Syslog has no acknowledgements: an entry that was on its way when a connection broke may be lost.
"""

from __future__ import annotations

import asyncio
import os
import platform
import ssl

from muster.app.export import activity_export
from muster.app.export import settings as export_settings
from muster.core import messages
from muster.core.formats import syslog

CONNECT_S = 10.0


def to_message(entry: messages.Decision, settings: export_settings.SyslogSettings, domain: str) -> bytes:
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

    def __init__(self, settings: export_settings.SyslogSettings) -> None:
        super().__init__(settings.url)
        self._settings = settings
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._datagrams: asyncio.DatagramTransport | None = None

    async def _deliver(self, entry: messages.Decision, domain: str) -> None:
        await self._send(to_message(entry, self._settings, domain))

    async def _open(self) -> None:
        transport, host, port = export_settings.server_of(self._settings.url)
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
