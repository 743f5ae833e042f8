"""The follower of the log: applies every record that this node has not applied itself, in order."""

from __future__ import annotations

import asyncio
import contextlib

from muster.bus import api
from muster.core import errors
from muster.inform import protocol
from muster.inform.node import state
from muster.inform.node.log import context_log, view_writer

RETRY_S = 0.5


class LogFollower:
    """`catch_up` returns when `run`, in a task, has received the whole log."""

    def __init__(self, shared: state.NodeState, writer: view_writer.ViewWriter | None) -> None:
        self._state = shared
        self._view_writer = writer
        self.malformed = 0

    async def catch_up(self) -> None:
        """Receive the whole log; there is no time limit while it makes progress."""
        shared = self._state
        moved_at_s = shared.now_s()
        while True:
            position = shared.position
            try:
                return await shared.refresh(api.DURABLE_TIMEOUT_S)
            except errors.Unavailable:
                if shared.position != position:
                    moved_at_s = shared.now_s()
                elif shared.now_s() - moved_at_s > 2 * api.DURABLE_TIMEOUT_S:
                    raise
                await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        shared = self._state
        while True:
            try:
                async with shared.log.follow(shared.position + 1) as following:
                    while True:
                        try:
                            await self._apply_all(following)
                        except errors.Dropped as error:
                            # Older records were removed for newer ones, which come next.
                            shared.position = max(shared.position, error.last)
            except errors.Unavailable as error:
                state.events.info("log-lost", node=shared.name, error=error)
                await asyncio.sleep(RETRY_S)

    async def _apply_all(self, following: api.OrderedConsumer) -> None:
        number = 0
        async for stored in following:
            acknowledgement = self.apply(stored)
            if acknowledgement is not None:
                await self._publish(*acknowledgement)
            number += 1
            if number % 200 == 0 or self._state.unsaved.is_full:
                await self._yield_to_others()

    async def _yield_to_others(self) -> None:
        """Let other tasks run, and wait for the view if necessary."""
        await asyncio.sleep(0)
        if self._view_writer is not None:
            await self._view_writer.wait_for_space()

    def apply(self, stored: api.StoredMessage) -> tuple[str, bytes] | None:
        """Apply a record. Return the acknowledgement to send: subject and data."""
        shared = self._state
        own = shared.own.pop(stored.sequence, None)
        if own is not None:
            shared.seen(stored.sequence, own, len(stored.data))
            return None
        mine = shared.log.pending(stored)
        try:
            entry = (
                context_log.ContextLogEntry(mine, stored.sequence)
                if mine
                else context_log.parse_entry(stored)
            )
        except errors.InvalidInput as error:
            self.malformed += 1
            state.events.error("invalid-record", sequence=stored.sequence, error=error)
            shared.seen(stored.sequence, "")
            return None
        record = entry.record
        if record.key.startswith(context_log.OWN_KEYS):
            shared.seen(entry.sequence, "")
            return None
        shared.apply(entry, just_stamped=mine is not None)
        shared.seen(entry.sequence, record.key, len(stored.data))
        if shared.name not in record.holders:
            shared.remember_holders(record.key, record.holders)
        elif record.acknowledge and record.holders[0] != shared.name:
            applied = protocol.ReplicaApplied(shared.name, record.key, record.stamp)
            return protocol.to_node(record.holders[0], "applied"), protocol.encode(applied)
        return None

    async def _publish(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):
            await self._state.bus.publish(subject, data)
