"""Backups of a registry's log on the simulated bus."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from muster.bus.memory import network, storage
from muster.manage import protocol
from muster.manage.registry import registry_log


def copy_log(net: network.SimulatedNetwork) -> storage.SimulatedLog:
    return copy.deepcopy(net.logs[protocol.STREAM])


async def restore_log(
    net: network.SimulatedNetwork,
    copied: storage.SimulatedLog,
    *,
    is_marked: bool = True,
    clock: Callable[[], float] = time.time,
) -> None:
    """While no registry runs."""
    net.logs[protocol.STREAM] = copy.deepcopy(copied)
    if is_marked:
        async with (
            await net.connect("restorer") as bus,
            await registry_log.RegistryLog.open(bus) as log,
        ):
            await log.mark_restored(clock=clock)
