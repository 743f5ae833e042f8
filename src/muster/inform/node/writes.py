"""Writes of clients: the initiator finds the primary of the context and forwards the write to it.

The node that receives a client's request is the initiator.  For a new context it chooses the holders.
Otherwise it forwards the write to the primary (`muster.inform.node.primary`).  If the primary does not reply,
the initiator fences it: from then on its contexts have other primaries, chosen among their holders
(`muster.inform.node.log.fences`).  A node that answers from memory while it has its lease is fenced after the
end of the lease only.  A fenced node that lives learns it from the log, and goes on with what it still is.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid

import msgspec

from muster.core import errors
from muster.inform import protocol
from muster.inform.mounts import base as mounts
from muster.inform.node import primary, state, write_attempts
from muster.inform.node.replicas import placement

REQUEST_CHARACTERS_MAX = 64
FENCE_S = 10.0  # a node that goes on appending is not fenced, so the write is refused
FENCE_AGAIN_S = 0.1


class ContextWriter:
    def __init__(self, shared: state.NodeState, primary_writer: primary.PrimaryWriter) -> None:
        self._state = shared
        self._primary = primary_writer
        self._attempts = write_attempts.WriteAttempts()

    async def write(
        self, write: protocol.PutContext | protocol.DeleteContext, writer: str
    ) -> protocol.WriteResult:
        write = _checked(write, writer)
        return await self._attempts.run(writer, write, lambda: self._write(write, writer))

    async def _write(
        self, write: protocol.PutContext | protocol.DeleteContext, writer: str
    ) -> protocol.WriteResult:
        shared, key = self._state, write.key
        begun_s = shared.now_s()
        for _ in range(primary.ATTEMPTS):
            shared.require_recent(begun_s, key)
            with primary.in_doubt(key, is_repeat=write.repeat):
                holders = await self._holders(key)
                if holders:
                    update = protocol.UpdateContext(write, writer)
                elif isinstance(write, protocol.DeleteContext) and not write.repeat:
                    await shared.refresh(shared.settings.timeout_s, confirmed=True)
                    if await self._holders(key):
                        continue
                    raise errors.NotFound(f"no context {key!r}")
                else:
                    holders = tuple(self._choose())
                    update = protocol.UpdateContext(write, writer, holders)
                primary_node = holders[0]
                try:
                    if primary_node == shared.name:
                        return await self._primary.update(update)
                    return await shared.request(primary_node, "update", update, protocol.WriteResult)
                except protocol.PrimaryMoved:
                    shared.holder_hints.pop(key, None)
                    await shared.refresh(shared.settings.timeout_s)
                    continue
                except state.Silent:
                    write = msgspec.structs.replace(write, repeat=True)
            with primary.in_doubt(key):
                if (await self._holders(key) or holders)[0] == primary_node:
                    await self.fence(primary_node)
        with primary.in_doubt(key, is_repeat=write.repeat):
            raise errors.Unavailable(
                f"the primary of {key!r} moved {primary.ATTEMPTS} times during the write"
            )

    def begin(
        self, write: protocol.PutContext | protocol.DeleteContext, writer: str
    ) -> tuple[protocol.ContextRecord, asyncio.Future[int]] | None:
        """Append at once what needs nothing but this node's memory, and no task. None: use `write`, also
        after an error of the future, for the same write as a repetition."""
        write = _checked(write, writer)
        shared, key = self._state, write.key
        if (
            write.repeat
            or (isinstance(write, protocol.PutContext) and write.ack != "logged")
            or self._attempts.has(writer, write)
            or shared.executed(writer, key, write.request) is not None
        ):
            return None
        base = self._primary.base_here(key)
        if base is None or not shared.key_locks.try_acquire(key):
            return None
        try:
            new = () if base.holders else tuple(self._choose())
            record = self._primary.next_record(protocol.UpdateContext(write, writer, new), base)
            stored = shared.log.append(record, base.since)
        except BaseException:
            shared.key_locks.release(key)
            raise
        stored.add_done_callback(lambda _: shared.key_locks.release(key))
        return record, stored

    async def fence(self, node: str) -> None:
        """End the time of a node as the primary of any context; it does not reply."""
        shared = self._state
        begun_s, known = shared.now_s(), shared.log.applied
        async with shared.key_locks.hold(f"\0{node}"):  # no key of a context
            shared.directory.remove(node)
            live = [
                protocol.FenceCandidate(other.node, other.load, other.proximity_ms, other.zone)
                for other in shared.directory.candidates(shared.information())
            ]
            while not any(fence.node == node and fence.sequence > known for fence in shared.fences):
                if await shared.log.fence(node, live):
                    return
                if shared.now_s() - begun_s > FENCE_S:
                    raise errors.Unavailable(f"{node} does not reply, and still appends to the log")
                await asyncio.sleep(shared.log.lease_left_s(node) + FENCE_AGAIN_S)

    def _choose(self) -> list[str]:
        shared = self._state
        candidates = shared.directory.candidates(shared.information())
        return placement.rank(candidates, shared.replica_target(), watermark=shared.settings.watermark)

    async def _holders(self, key: str) -> tuple[str, ...]:
        """The primary first; empty if there is no context."""
        shared = self._state
        replica = shared.replicas.index.get(key)
        if replica is not None:
            return replica.holders
        if shared.holds_all:
            return ()
        if (known := shared.holder_hints.get(key)) is not None:
            return known
        entry = await shared.current(key)
        return shared.remember_holders(key, entry.record.holders) if entry is not None else ()


def _checked(
    write: protocol.PutContext | protocol.DeleteContext, writer: str
) -> protocol.PutContext | protocol.DeleteContext:
    if not write.request:
        write = msgspec.structs.replace(write, request=uuid.uuid4().hex)
    elif len(write.request) > REQUEST_CHARACTERS_MAX:  # each context stores the last one
        raise errors.InvalidInput(f"a request id has at most {REQUEST_CHARACTERS_MAX} characters")
    if write.key.startswith(mounts.PREFIX):
        raise errors.Refused(f"{write.key!r} belongs to a mount, which is read-only")
    if isinstance(write, protocol.DeleteContext):
        protocol.check_key(write.key)
        return write
    if write.key:
        protocol.check_key(write.key)
    else:
        # The same key for each attempt.
        name = hashlib.blake2b(f"{writer}\0{write.request}".encode(), digest_size=16).digest()
        write = msgspec.structs.replace(write, key=str(uuid.UUID(bytes=name, version=4)))
    if len(write.value) > protocol.VALUE_BYTES_MAX:
        raise errors.LimitExceeded(
            f"a value of {len(write.value)} bytes: the maximum is {protocol.VALUE_BYTES_MAX}",
            hint="store the data elsewhere, and its address in the context",
        )
    if write.attributes and len(protocol.encode(write.attributes)) > protocol.ATTRIBUTES_BYTES_MAX:
        raise errors.LimitExceeded(f"the attributes have more than {protocol.ATTRIBUTES_BYTES_MAX} bytes")
    if not (write.lease_s == 0 or 0.001 <= write.lease_s <= 100 * 365 * 86400):
        raise errors.InvalidInput(f"a lease of {write.lease_s!r} s: use 1 millisecond to 100 years")
    return write
