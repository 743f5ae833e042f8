"""Export of the activity log to a syslog server.

The component stores its position in the log and continues there after an interruption.  Syslog has no
acknowledgements: an entry that was on its way when a connection broke may be lost, or arrive twice with the
same ``id``.  Entries from before the export was enabled are not sent.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import ssl
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib import parse

from muster.app.components import component
from muster.app.components import context as context_
from muster.core import errors, health, messages
from muster.core.formats import syslog
from muster.core.settings import sections

doc = sections.field_doc

COLLECTION = "syslog"
POSITION = "position"
RETRY_S = 1.0
CONNECT_S = 10.0
PORTS = {"udp": 514, "tcp": 601, "tls": 6514}
_SEVERITY = {
    messages.DecisionOutcome.FAILED: "error",
    messages.DecisionOutcome.IN_DOUBT: "warning",
    messages.DecisionOutcome.REFUSED: "warning",
}


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
    actor = entry.on_behalf_of or entry.who
    data = {
        "id": entry.id,
        "domain": domain,
        "who": entry.who,
        "on_behalf_of": entry.on_behalf_of,
        "target": entry.target,
        "outcome": entry.outcome.value,
        "trace": entry.trace_id,
        **entry.details,
    }
    return syslog.message(
        facility=settings.facility,
        severity=_SEVERITY.get(entry.outcome, "notice"),
        at_ms=entry.at_ms,
        host=platform.node(),
        application="muster",
        process=str(os.getpid()),
        kind=entry.what,
        data={name: value for name, value in data.items() if value},
        text=f"{actor}: {entry.what} {entry.target}: {entry.outcome.value} ({entry.why})",
    )


class SyslogComponent:
    name = "syslog"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: SyslogSettings) -> None:
        self._settings = settings
        self._problem = ""
        self._sent = 0
        self._missed = 0  # entries that the log dropped before they were sent
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._datagrams: asyncio.DatagramTransport | None = None

    async def start(self, context: context_.ComponentContext) -> None:
        context.tasks.loop("syslog", functools.partial(self._export, context))

    async def stop(self) -> None:
        await self._disconnect()

    def health(self) -> component.ComponentHealth:
        state = health.HealthState.LATE if self._problem else health.HealthState.UP
        return component.ComponentHealth(
            state, self._problem, {"syslog_sent": self._sent, "syslog_missed": self._missed}
        )

    async def _export(self, context: context_.ComponentContext) -> None:
        while True:
            try:
                await self._follow(context)
            except errors.Dropped as error:
                self._missed += error.last - error.first + 1
                context.log.error("activities-not-exported", first=error.first, last=error.last)
                await _store_position(context, error.last)
            except (OSError, TimeoutError, errors.Unavailable, errors.NotFound) as error:
                self._problem = f"{self._settings.url}: {error or 'no connection'}"
                await self._disconnect()
                await asyncio.sleep(RETRY_S)

    async def _follow(self, context: context_.ComponentContext) -> None:
        stored = await context.store.get(COLLECTION, POSITION)
        try:
            stream = await context.bus.open_stream(messages.DECISIONS_STREAM)
        except errors.NotFound:
            if stored is None:  # the log has no entry yet: the first one is exported
                await _store_position(context, 0)
            raise
        last = (await stream.state()).last_sequence
        position = last if stored is None else int(stored.value)
        if position > last:  # the log was created anew
            position = 0
        await _store_position(context, position)
        await self._connect()
        self._problem = ""
        async with stream.follow(position + 1, gaps=True) as following:
            async for item in following:
                try:
                    entry = messages.decode(item.data, messages.Decision)
                except errors.MusterError:
                    continue
                await self._send(to_message(entry, self._settings, context.settings.domain.name))
                self._sent += 1
                await _store_position(context, item.sequence)

    async def _connect(self) -> None:
        await self._disconnect()
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

    async def _disconnect(self) -> None:
        if self._datagrams is not None:
            self._datagrams.close()
            self._datagrams = None
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


async def _store_position(context: context_.ComponentContext, position: int) -> None:
    await context.store.put(COLLECTION, POSITION, str(position).encode())
