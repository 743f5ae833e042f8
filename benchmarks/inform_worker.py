"""One information node in a process of its own, for `benchmarks.inform`: ``URL NAME VIEW SETTINGS [SHARE]
[REPLICAS]``.

SHARE is that of each identity: without it, a single client may use all of the node.  REPLICAS are those of
the log.

Beside it runs an echo server, which measures the cost of the network path alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pathlib
import sys
import time

import msgspec

from benchmarks import measure
from muster.app.supervisor import worker
from muster.bus import api
from muster.bus.client import client
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import listener
from muster.bus.rpc import admission
from muster.inform import settings
from muster.inform.node import node as node_node
from muster.trust import keyring, peer_admission


def echo_of(name: str) -> str:
    return f"topic.bench.echo.{name}"


async def main(
    url: str, name: str, view: str, expected: str, share: str = "100", replicas: str = "1", keys: str = ""
) -> None:
    """``keys``: of a keyring; then clients may connect directly."""
    admission.of_loop(asyncio.get_running_loop()).share = float(share)
    chosen = msgspec.json.decode(expected, type=settings.InformSettings)
    worker.relax_gc()  # as in the processes of a domain
    empty_bytes = measure.resident_bytes(os.getpid())
    begun = time.perf_counter()

    def echo(message: api.Message) -> None:
        message.respond_now(message.data)

    async with contextlib.AsyncExitStack() as stack:
        bus: api.Bus = await stack.enter_async_context(await client.connect((url,), identity=name))
        address = None
        if keys:
            direct = direct_bus.DirectBus(bus, name, lambda _: "")
            trust = keyring.Keyring.open(pathlib.Path(keys))
            admitted = peer_admission.PeerAdmission(trust.folder)
            listening = listener.DirectListener(direct, admitted, functools.partial(trust.credentials, name))
            await stack.enter_async_context(listening)
            bus, address = direct.as_bus(), msgspec.to_builtins(listening.address)
        node = await node_node.start(
            bus, settings=chosen, view=pathlib.Path(view), max_bytes=4 << 30, replicas=int(replicas)
        )
        await bus.subscribe(echo_of(name), handler=echo)
        facts = {
            "start_s": time.perf_counter() - begun,
            "contexts": node.replicas.permanent,
            "resident_bytes": measure.resident_bytes(os.getpid()),
            "empty_bytes": empty_bytes,
            "address": address,
        }
        print(json.dumps(facts), flush=True)
        async with node:
            await asyncio.to_thread(sys.stdin.read)  # until we are let go


if __name__ == "__main__":
    measure.run_fast(main(*sys.argv[1:]))
