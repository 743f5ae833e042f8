"""One identity that floods: other clients are served, and it cannot fill the store."""

from __future__ import annotations

import asyncio
import time

from muster.bus.rpc import requests
from muster.testing.eventually import eventually

MALFORMED = b"PUB muster.inform.from.eve.read.any.get _R.@inform.eve.s.1 2\r\n{}\r\n"
UNKNOWN = b"PUB muster.inform.from.eve.read.any.nothing _R.@inform.eve.s.1 2\r\n{}\r\n"


async def test_malformed_requests_of_one_client_do_not_stall_another(start_node, inform, connect, broker):
    await start_node()
    await inform.put("k", b"v")
    before = requests.refusals().get(("inform", "rate"), 0)
    host, _, port = broker.url.removeprefix("nats://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false}\r\n')
    slowest_s = 0.0
    for _ in range(50):
        writer.write((MALFORMED + UNKNOWN) * 200)  # 20,000 in all
        await writer.drain()
        began_s = time.monotonic()
        assert (await inform.get("k")).value == b"v"
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    await eventually(lambda: requests.refusals().get(("inform", "rate"), 0) - before > 15_000)
    assert slowest_s < 1.0
    writer.close()
