"""Listeners that follow their certificate's file."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from muster.bus.http import server as http_server
from muster.core.net import tls
from muster.testing.eventually import eventually
from muster.trust import certificates

HOSTS = ["127.0.0.1"]


async def test_a_renewed_certificate_is_used_for_new_connections(tmp_path):
    made = certificates.CertificateStore.create(tmp_path, "north", lifetime_s=certificates.DAY_S)
    made.ensure("web", HOSTS)
    pair = made.pair("web")
    context = tls.for_server(pair.path)
    keeping = asyncio.create_task(
        certificates.keep_current(tls.RenewableTls(context, pair.path), look_s=0.02)
    )

    async def serial() -> str:
        client = ssl.create_default_context(cafile=str(pair.bundle))
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=client)
        actual = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()
        return str(actual)

    async with await http_server.serve({"/livez": lambda _: http_server.text("ok")}, tls=context) as server:
        before = await serial()
        await asyncio.to_thread(pair.path.rename, tmp_path / "away")

        async def unreadable() -> bool:
            return not pair.path.exists() and await serial() == before

        await eventually(unreadable)  # and it goes on with what it has
        made.ensure("web", HOSTS)

        async def changed() -> bool:
            return await serial() != before

        await eventually(changed)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
