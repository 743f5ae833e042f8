"""Finds messages that a stream has lost: damaged blocks on a disk, a tail that a restart did not recover.

A broker verifies the checksum of a message when it reads it, and treats a damaged one as if it did not exist:
its number is missing, but neither among the deleted ones nor below the first. After a crash it rebuilds the
index of a damaged block up to the first error; then the last sequence is lower than before, and the numbers
are used again. So both are checked from the outside: `missing_sequences` reads a stream completely, and
`StreamMark` compares the last sequence with one that was recorded earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from muster.bus.client import client
from muster.core import errors

READ_BYTES_PER_S = 8 << 20  # of a check in the background
LEADER_S = 15.0  # for a new leader of a stream
POLL_S = 0.2
RANGES_SHOWN = 5

Ranges = Sequence[tuple[int, int]]  # first and last sequence


class StreamMark(msgspec.Struct, frozen=True):
    """How far a stream had grown. ``created``: another stream may have the same name later."""

    created: str
    last: int
    lost_bytes: int = 0  # that the broker itself reported


async def marks(bus: client.NatsBus) -> dict[str, StreamMark]:
    """The marks of all streams now."""
    current: dict[str, StreamMark] = {}
    for name in await bus.streams():
        with contextlib.suppress(errors.NotFound):  # deleted meanwhile
            info = await bus.storage.stream_info(name)
            state = info["state"]
            lost = (state.get("lost") or {}).get("bytes", 0)
            current[name] = StreamMark(info["created"], state["last_seq"], lost)
    return current


def regression(before: StreamMark | None, now: StreamMark) -> str:
    """What a stream has lost since ``before``; empty: nothing."""
    reported = before.lost_bytes if before is not None and before.created == now.created else 0
    if before is not None and before.created == now.created and now.last < before.last:
        count = before.last - now.last
        return f"the last {count:,} messages, {describe([(now.last + 1, before.last)])}"
    if now.lost_bytes > reported:
        return f"{now.lost_bytes:,} bytes of damaged messages"
    return ""


async def missing_sequences(bus: client.NatsBus, name: str) -> list[tuple[int, int]]:
    """Sequences that should be readable and are not. Reads the complete stream, from any of its replicas."""
    stream = await bus.open_stream(name)
    state = await stream.state()
    gaps: list[tuple[int, int]] = []
    expected, last = state.first_sequence, state.last_sequence
    while expected <= last:
        try:
            async for message in stream.read_all(expected, last, gaps=True):
                if message.sequence > expected:
                    gaps.append((expected, message.sequence - 1))
                expected = message.sequence + 1
                await asyncio.sleep(len(message.data) / READ_BYTES_PER_S)
        except errors.Dropped as dropped:  # the oldest were removed during the read
            expected = dropped.last + 1
            continue
        if expected <= last:
            gaps.append((expected, last))
        break
    if not gaps:
        return []
    info = (await bus.storage.call(f"STREAM.INFO.{name}", {"deleted_details": True}))["state"]
    deleted = set(info.get("deleted") or ())
    return ranges(
        sequence
        for first, final in gaps
        for sequence in range(max(first, info["first_seq"]), final + 1)
        if sequence not in deleted
    )


def ranges(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending sequences as ranges."""
    merged: list[tuple[int, int]] = []
    for sequence in sequences:
        if merged and merged[-1][1] == sequence - 1:
            merged[-1] = (merged[-1][0], sequence)
        else:
            merged.append((sequence, sequence))
    return merged


def describe(lost: Ranges) -> str:
    """Ranges for a message to a user."""
    shown = ", ".join(
        f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in lost[:RANGES_SHOWN]
    )
    further = len(lost) - RANGES_SHOWN
    return f"{shown} and {further:,} further ranges" if further > 0 else shown


def count(lost: Ranges) -> int:
    return sum(last - first + 1 for first, last in lost)


class StreamReplicas(msgspec.Struct, frozen=True):
    """The brokers with a replica of a stream. ``leader`` is empty during an election."""

    leader: str
    others: tuple[str, ...]
    raft_group: str
    last_sequence: int


async def replicas(bus: client.NatsBus, name: str) -> StreamReplicas:
    info = await bus.storage.call(f"STREAM.INFO.{name}")
    cluster = info.get("cluster") or {}
    others = tuple(replica["name"] for replica in cluster.get("replicas") or ())
    return StreamReplicas(
        cluster.get("leader", ""), others, cluster.get("raft_group", ""), info["state"]["last_seq"]
    )


async def readable(bus: client.NatsBus, name: str, lost: Ranges) -> bool:
    """Whether the leader of a stream has all these messages."""
    stream = await bus.open_stream(name)
    for first, last in lost:
        for sequence in range(first, last + 1):
            try:
                await stream.get(sequence)
            except errors.NotFound:
                return False
    return True


async def find_intact_leader(bus: client.NatsBus, name: str, lost: Ranges) -> str | None:
    """Make a broker with all these messages the leader of a stream; returns the former leader, whose replica
    is damaged. None: no broker has all of them, or the leader has."""
    placed = await replicas(bus, name)
    if await readable(bus, name, lost):
        return None
    for other in placed.others:
        await bus.storage.call(
            f"STREAM.LEADER.STEPDOWN.{name}", {"placement": {"preferred": other}}, timeout_s=LEADER_S
        )
        await _wait_for_other_leader(bus, name, placed.leader)
        if await readable(bus, name, lost):
            return placed.leader
    return None


async def _wait_for_other_leader(bus: client.NatsBus, name: str, former: str) -> None:
    async with asyncio.timeout(LEADER_S):
        while True:
            if (await replicas(bus, name)).leader not in ("", former):
                return
            await asyncio.sleep(POLL_S)
