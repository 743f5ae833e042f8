"""Writes of clients: the initiator finds the primary of the context and forwards the write to it.

The node that receives a client's request is the initiator.  For a new context it chooses the holders.
Otherwise it forwards the write to the primary (`muster.inform.node.primary`).  If the primary does not reply,
the initiator selects another one among the holders: it sends a Primary-Copy Selection Request to the topic of
the context and notifies the best of the nodes that reply.  That node makes itself the primary with an append
under compare-and-set, so two concurrent initiators make one new primary.

A context that this node has no record of is most likely new, so it is written as new.  If it is not, the log
rejects the append, which costs no more than a read before the write.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from typing import NamedTuple

import msgspec

from muster.bus import api
from muster.core import errors
from muster.inform import protocol
from muster.inform.mounts import base as mounts
from muster.inform.node import primary, state, write_attempts
from muster.inform.node.log import context_log
from muster.inform.node.replicas import placement

REQUEST_CHARACTERS_MAX = 64


class PendingWrite(NamedTuple):
    """A write whose append has been sent."""

    update: protocol.UpdateContext
    record: protocol.ContextRecord
    stored: asyncio.Future[int]


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
        may_be_new = isinstance(write, protocol.PutContext) and not write.expected_version
        for _ in range(primary.ATTEMPTS):
            shared.require_recent(begun_s, key)
            with primary.in_doubt(key, is_repeat=write.repeat):
                holders = self._known_holders(key)
                if not holders and not may_be_new:
                    entry = await shared.log.last(key)
                    holders = shared.remember_holders(key, entry.record.holders) if entry is not None else ()
                may_be_new = False
                if holders:
                    update = protocol.UpdateContext(write, writer)
                elif isinstance(write, protocol.DeleteContext) and not write.repeat:
                    if await shared.log.is_last(key, 0, timeout_s=shared.settings.timeout_s):
                        raise errors.NotFound(f"no context {key!r}")
                    continue
                else:
                    holders = tuple(self._choose())
                    update = protocol.UpdateContext(write, writer, holders)
                primary_node = holders[0]
                try:
                    if primary_node == shared.name:
                        return await self._primary.update(update)
                    return await shared.request(primary_node, "update", update, protocol.WriteResult)
                except protocol.PrimaryMoved:
                    if primary_node != shared.name:  # the local update has already stored the new holders
                        shared.holder_hints.pop(key, None)
                    continue
                except state.Silent:
                    write = msgspec.structs.replace(write, repeat=True)
            with primary.in_doubt(key):
                shared.holder_hints.pop(key, None)
                shared.directory.remove(primary_node)
                await self._select_primary(key, silent=primary_node)
        with primary.in_doubt(key, is_repeat=write.repeat):
            raise errors.Unavailable(
                f"the primary of {key!r} moved {primary.ATTEMPTS} times during the write"
            )

    def begin(self, write: protocol.PutContext | protocol.DeleteContext, writer: str) -> PendingWrite | None:
        """Start a write in the common case: this node is the primary and no other write of the key is
        pending.

        It needs no task, only `finish` when it is stored.  None: use `write`.
        """
        write = _checked(write, writer)
        if self._attempts.has(writer, write):
            return None
        shared, key = self._state, write.key
        base = self._primary.base_here(key)
        if base is not None:
            update = protocol.UpdateContext(write, writer)
        elif (
            isinstance(write, protocol.PutContext) and not write.expected_version and not self._is_known(key)
        ):
            base, update = primary.NOTHING, protocol.UpdateContext(write, writer, tuple(self._choose()))
        else:
            return None
        if (
            isinstance(write, protocol.PutContext) and write.ack != "logged"
        ) or not shared.key_locks.try_acquire(key):
            return None
        try:
            record = self._primary.next_record(update, base)
            if record is not None:
                stored = shared.log.append_nowait(record, base.sequence, timeout_s=shared.settings.timeout_s)
                return PendingWrite(update, record, stored)
        except BaseException:
            shared.key_locks.release(key)
            raise
        shared.key_locks.release(key)
        return None

    def finish(self, begun: PendingWrite) -> protocol.WriteResult:
        """Return the result of a stored write; raises the error otherwise, and `resume` is next."""
        shared, record = self._state, begun.record
        try:
            sequence = begun.stored.result()
        except errors.TimedOut:
            raise  # keep the lock until the state of the key is known
        except BaseException:
            shared.key_locks.release(record.key)
            raise
        if isinstance(sequence, api.Duplicate):
            shared.key_locks.release(record.key)
            raise errors.Conflict(f"{record.key!r}: the write was stored before")
        entry = context_log.ContextLogEntry(record, sequence)
        shared.apply(entry, just_stamped=True)  # equivalent: to observe our own stamp changes nothing
        shared.appended(sequence, record.key)
        shared.key_locks.release(record.key)
        return primary.written(entry, 1)

    async def resume(self, begun: PendingWrite, error: errors.MusterError) -> protocol.WriteResult:
        """Continue a started write that is not known to be stored."""
        if isinstance(error, errors.TimedOut):
            try:
                return primary.written(await self._primary.find_stored(begun.record, error), 1)
            finally:
                self._state.key_locks.release(begun.record.key)
        if isinstance(error, errors.Conflict):
            write = msgspec.structs.replace(begun.update.write, repeat=True)
            with primary.in_doubt(write.key):
                await self._primary.base_in_log(write.key)  # the local state is outdated
            return await self.write(write, begun.update.writer)
        raise error

    def _choose(self) -> list[str]:
        shared = self._state
        candidates = shared.directory.candidates(shared.information())
        return placement.rank(candidates, shared.replica_target(), watermark=shared.settings.watermark)

    def _known_holders(self, key: str) -> tuple[str, ...]:
        """The primary first; empty for an unknown context."""
        replica = self._state.replicas.index.get(key)
        if replica is not None and not replica.temporary:
            return replica.holders
        return self._state.holder_hints.get(key, ())

    def _is_known(self, key: str) -> bool:
        return key in self._state.holder_hints or key in self._state.replicas.index

    async def _select_primary(self, key: str, *, silent: str) -> None:
        shared = self._state
        entry = await shared.log.last(key)
        if entry is None or entry.record.holders[0] != silent:
            return
        others = [node for node in entry.record.holders if node not in (silent, shared.name)]
        replies = await shared.bus.gather(
            protocol.topic(protocol.bucket(key), "select"),
            protocol.encode(protocol.ContextQuery(key, silent)),
            enough=max(1, len(others)),
            timeout_s=min(1.0, shared.settings.timeout_s),
        )
        information = [protocol.result_of(message.data, protocol.ServerInformation) for message in replies]
        known = {candidate.node: candidate for candidate in shared.directory.candidates(shared.information())}
        candidates = [
            known.get(
                node_information.node,
                placement.ReplicaCandidate(node_information.node, node_information.load.ratio, 1000.0),
            )
            for node_information in information
        ]
        if shared.name in entry.record.holders:
            candidates.append(known[shared.name])
        for node in placement.rank(candidates, len(candidates)):
            try:
                if node == shared.name:
                    await self._primary.become_primary(key, silent)
                else:
                    await shared.request(
                        node, "become-primary", protocol.ContextQuery(key, silent), type(None)
                    )
            except state.Silent:
                continue
            return
        await self._primary.become_primary(key, silent)  # no holder is left: restore it from the log


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
