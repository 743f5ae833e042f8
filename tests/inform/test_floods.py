"""One identity that floods: other clients are served, and it cannot fill the store."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from muster.bus.rpc import requests
from muster.core import errors
from muster.inform import client
from muster.testing.eventually import eventually

MALFORMED = b"PUB muster.inform.from.eve.read.any.get _R.@inform.eve.s.1 2\r\n{}\r\n"
UNKNOWN = b"PUB muster.inform.from.eve.read.any.nothing _R.@inform.eve.s.1 2\r\n{}\r\n"


async def test_malformed_requests_of_one_client_do_not_stall_another(start_node, inform, connect, broker):
    await start_node()
    await inform.put("k", b"v")

    def refused() -> int:
        return sum(requests.refusals().get(("inform", reason), 0) for reason in ("rate", "pending"))

    before = refused()
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
    await eventually(lambda: refused() - before > 15_000)
    assert slowest_s < 1.0
    writer.close()


MIB = 1 << 20


async def fill(contexts: client.InformClient, prefix: str) -> errors.LimitExceeded:
    """Write until a write is refused."""
    for number in range(200):
        try:
            await contexts.put(f"{prefix}/{number}", bytes(MIB // 4))
        except errors.LimitExceeded as error:
            return error
    raise AssertionError("nothing was refused")


async def test_an_identity_that_has_its_share_of_the_log_cannot_take_more(start_node, inform, connect):
    node = await start_node(max_bytes=16 * MIB, share_per_identity=0.25)
    eve = client.InformClient(await connect("eve"))
    refused = await fill(eve, "junk")
    assert "inform.share_per_identity" in (refused.hint or "")
    assert sum(key.startswith("junk") for key in node.replicas.index) == 15
    await inform.put("k", bytes(MIB))
    # What was deleted stays in the log for some time, so it does not make room at once.
    await eve.delete("junk/0")
    with pytest.raises(errors.LimitExceeded, match="eve has"):
        await eve.put("junk/0", bytes(MIB // 3))
    # Concurrent writes do not exceed it either.
    bob = client.InformClient(await connect("bob"))
    outcomes = await asyncio.gather(
        *(bob.put(f"many/{number}", bytes(MIB // 2)) for number in range(20)), return_exceptions=True
    )
    assert sum(isinstance(outcome, errors.LimitExceeded) for outcome in outcomes) == 13


async def test_versions_of_one_context_count(start_node, connect):
    await start_node(max_bytes=16 * MIB, share_per_identity=0.25)
    eve = client.InformClient(await connect("eve"))
    stored = 0
    with contextlib.suppress(errors.LimitExceeded):
        while stored < 100:
            await eve.put("junk", bytes(MIB // 2))
            stored += 1
    assert 7 <= stored <= 12


async def test_an_identity_has_a_number_of_contexts(start_node, inform, connect):
    await start_node(contexts_per_identity=3)
    eve = client.InformClient(await connect("eve"))
    for number in range(3):
        await eve.put(f"e{number}", b"x")
    with pytest.raises(errors.LimitExceeded, match=r"eve has 3 contexts, of 3") as refused:
        await eve.put("e3", b"x")
    assert "inform.contexts_per_identity" in (refused.value.hint or "")
    await eve.put("e0", b"y")
    await inform.put("a", b"x")
    await eve.delete("e1")
    await eve.put("e3", b"x")


async def test_a_full_log_has_room_for_deletions_and_operators(start_node, connect):
    roles = {"olga": "operator"}
    await start_node(max_bytes=8 * MIB, share_per_identity=1.0, role_of=lambda name: roles.get(name, "user"))
    eve, ann, olga = [client.InformClient(await connect(name)) for name in ("eve", "ann", "olga")]
    await ann.put("a", b"x")
    refused = await fill(eve, "junk")
    assert "retention.contexts.max_bytes" in (refused.hint or "")
    with pytest.raises(errors.LimitExceeded):
        await ann.put("b", bytes(MIB // 4))
    await ann.delete("a")
    await olga.put("o", bytes(MIB // 4))
