"""The activity log as syslog messages: their format, and their delivery to a server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.app.export import settings as export_settings
from muster.app.export import syslog_export
from muster.app.operations import audit
from muster.core import errors, messages
from muster.core.formats import syslog
from muster.core.settings import loader
from muster.testing.eventually import eventually
from muster.trust.permissions import roles

# The grammar of RFC 5424, section 6, as a pattern
RFC5424 = re.compile(
    rb"<(?P<pri>\d{1,3})>1 (?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) [!-~]{1,255} [!-~]{1,48} "
    rb"[!-~]{1,128} (?P<kind>[!-~]{1,32}) "
    rb'\[muster@32473(?P<data>( [!-~]{1,32}="(?:[^"\\\]]|\\["\\\]])*")+)\] \xef\xbb\xbf(?P<text>.*)',
)
ENTRY = messages.Decision(
    id="d1",
    who="web",
    on_behalf_of="ann",
    what="apply",
    target='shop "x"]',
    why="requested\nby ann",
    at_ms=1_700_000_000_123,
    outcome=messages.DecisionOutcome.REFUSED,
    details={"interface": "cli"},
)
SETTINGS = export_settings.SyslogSettings(url="udp://127.0.0.1:514")


def test_an_entry_has_the_form_of_rfc_5424():
    data = syslog_export.to_message(ENTRY, SETTINGS, "lab")
    match = RFC5424.fullmatch(data)
    assert match is not None, data
    assert int(match["pri"]) == 4 * 8 + 4  # auth.warning
    assert match["time"] == b"2023-11-14T22:13:20.123Z"
    assert match["kind"] == b"apply"
    assert rb'target="shop \"x\"\]"' in match["data"]
    assert b'who="web"' in match["data"]
    assert b'on_behalf_of="ann"' in match["data"]
    assert match["text"].decode() == 'ann: apply shop "x"]: refused (requested by ann)'
    assert syslog.framed(b"abc") == b"3 abc"


@pytest.mark.parametrize("url", ["http://h:1", "tcp://", "tcp://h:x", "h:514"])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(errors.InvalidInput):
        export_settings.SyslogSettings(url=url)


class SyslogServer:
    """A syslog server over TCP that can close its connections."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int(await reader.readuntil(b" "))
                self.messages.append(await reader.readexactly(length))
        writer.close()

    @property
    def targets(self) -> list[str]:
        return [re.search(rb'target="([^"]*)"', message)[1].decode() for message in self.messages]  # type: ignore[index]


@contextlib.asynccontextmanager
async def running(folder: Path, url: str) -> AsyncIterator[domain.Domain]:
    off = {f"{part}.enabled": False for part in ("web", "manage", "message", "inform", "notify")}
    flags: dict[str, Any] = {"domain.data_dir": str(folder / "data"), "bus.port": 0, "syslog.url": url, **off}
    settings = loader.load(app_settings.Settings, flags=flags)
    async with domain.Domain(settings, components=factories.components(settings)) as started:
        yield started


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_entries_reach_the_server_once_also_after_it_and_the_domain_were_away(tmp_path: Path):
    server = SyslogServer()
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        async with running(tmp_path, f"tcp://127.0.0.1:{port}") as started:
            part = started.component(syslog_export.SyslogComponent)
            bus = await started.connect("ann", roles.Role.OPERATOR)

            async def act(target: str) -> None:
                await audit.publish_entry(bus, audit.audit_entry("ann", "restart", target))

            await eventually(lambda: "decisions" in part.health().reason, timeout_s=30)  # no entry yet
            await act("first")
            await eventually(lambda: server.targets == ["first"], timeout_s=30)
            assert RFC5424.fullmatch(server.messages[0])
            for writer in server.writers:
                writer.close()
            listening.close()  # the server is away
            await eventually(lambda: part._reader is not None and part._reader.at_eof())
            await act("second")
            await eventually(lambda: part.health().reason, timeout_s=30)
            again = await asyncio.start_server(server.connected, "127.0.0.1", port)
            await eventually(lambda: server.targets == ["first", "second"], timeout_s=30)
            await bus.close()
        async with again, running(tmp_path, f"tcp://127.0.0.1:{port}") as started:
            async with await started.connect("ann", roles.Role.OPERATOR) as bus:
                await audit.publish_entry(bus, audit.audit_entry("ann", "restart", "third"))
            await eventually(lambda: server.targets == ["first", "second", "third"], timeout_s=30)


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_entries_are_sent_as_datagrams(tmp_path: Path):
    received: asyncio.Queue[bytes] = asyncio.Queue()

    class Datagrams(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            received.put_nowait(data)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Datagrams, local_addr=("127.0.0.1", 0))
    try:
        url = f"udp://127.0.0.1:{transport.get_extra_info('sockname')[1]}"
        async with running(tmp_path, url) as started:
            part = started.component(syslog_export.SyslogComponent)
            await eventually(lambda: "decisions" in part.health().reason, timeout_s=30)
            async with await started.connect("ann", roles.Role.OPERATOR) as bus:
                await audit.publish_entry(bus, audit.audit_entry("ann", "restart", "web"))
            async with asyncio.timeout(30):
                assert RFC5424.fullmatch(await received.get())
    finally:
        transport.close()
