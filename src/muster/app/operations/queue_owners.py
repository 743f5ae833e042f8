"""Which processes dispatch the partitions of the queues."""

from __future__ import annotations

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors
from muster.message import protocol

ANSWER_S = 1.0
WAIT_S = 5.0  # for a dispatcher that is being started


async def examine(bus: api.Bus, requested: int) -> tuple[bool, str, str]:
    """Whether a partition has no owner; the finding and advice. ``requested``: the number of partitions that
    the settings state.
    """
    owners = await _read(bus)
    if "" in owners:
        advice = "see `muster status` and the logs: another process takes over within 15 s"
        return True, f"partition {owners.index('')} has no dispatcher", advice
    finding = ", ".join(f"partition {number} by {owner}" for number, owner in enumerate(owners))
    if len(owners) == requested:
        return False, finding, ""
    advice = f"the number is fixed when the domain first starts: set message.partitions = {len(owners)}"
    return False, f"{finding}; message.partitions is {requested}", advice


async def _read(bus: api.Bus) -> list[str]:
    """Host and process id of the owner of each partition, up to the first that has none (an empty text)."""
    owners: list[str] = []
    count = 1
    while len(owners) < count:
        reply = await _ask(bus, len(owners))
        owners.append(reply.owner)
        if not reply.owner:
            break
        count = reply.partitions
    return owners


async def _ask(bus: api.Bus, partition: int) -> protocol.DispatcherReply:
    subject, request = protocol.read_subject(bus.identity, partition), protocol.CountPartitions()
    try:
        reply = await client.exchange(
            bus, subject, protocol.encode(request), timeout_s=WAIT_S, try_s=ANSWER_S
        )
    except errors.Unavailable:
        return protocol.DispatcherReply()
    return protocol.read_reply(reply.data)
