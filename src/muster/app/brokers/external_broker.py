"""A broker with a configuration of its own, for the operating system to run: started, probed, restarted.

The brokers of a domain on several machines belong to none of its processes. A service manager restarts a
broker that ends, but does not notice one that is frozen. This process does, by the health page of the broker,
and the service manager watches this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from muster.app import service_manager
from muster.bus.brokers import binary, broker, monitor
from muster.core import errors
from muster.supervision import children


async def run(
    config_file: Path, stop: asyncio.Event, *, monitor_url: str, program: Path | None = None
) -> None:
    """Keep the broker running until ``stop`` is set."""
    if not await asyncio.to_thread(config_file.is_file):
        raise errors.NotFound(f"there is no configuration {config_file}")
    manager = service_manager.ServiceManager(os.environ)
    server = await binary.find(program)

    async def launch() -> children.ProcessHandle:
        return await asyncio.create_subprocess_exec(
            str(server.path), "-c", str(config_file), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )

    async def serves() -> bool:
        return (await monitor.health(monitor_url, "js-enabled-only=true")).ok

    child = children.ChildSupervisor(
        "broker", launch, probe=lambda: monitor.responds(monitor_url), probe_policy=broker.PROBE_POLICY
    )
    async with manager.reporting():
        await child.start()
        try:
            while not (stop.is_set() or await serves()):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), broker.POLL_S_MAX)
            manager.notify(service_manager.READY)
            await stop.wait()
            manager.notify(service_manager.STOPPING)
        finally:
            await child.stop((signal.SIGTERM, broker.STOP_TIMEOUT_S))
