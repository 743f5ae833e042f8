"""Checkpoints of a manager: the runtime state of its resources, sent to the registry in batches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, messages
from muster.manage import protocol

EVERY_S = 0.2
MAX = 500  # resources in one message

Page = dict[str, tuple[int, protocol.ResourceStatus]]  # resource: epoch and status


class CheckpointWriter:
    """``checkpoint_of`` returns the epoch and status of a resource, None if it is no longer managed here."""

    def __init__(
        self,
        bus: api.Bus,
        manager: str,
        *,
        may_act: Callable[[], bool],
        checkpoint_of: Callable[[str], tuple[int, protocol.ResourceStatus] | None],
        superseded: Callable[[str, int], None],
    ) -> None:
        self.due: set[str] = set()
        self._sending = asyncio.Lock()
        self._bus = bus
        self._manager = manager
        self._may_act = may_act
        self._checkpoint_of = checkpoint_of
        self._superseded = superseded

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(errors.MusterError):  # the registry is unavailable: they stay due
                await self.flush()

    async def flush(self, only: Collection[str] | None = None) -> None:
        """Send those that are due. Returns when they, and those that were being sent, are stored."""
        async with self._sending:
            while due := self.due if only is None else self.due & set(only):
                if not self._may_act():
                    raise errors.Unavailable(f"{self._manager} has to renew before it may store states")
                names = list(itertools.islice(due, MAX))
                self.due.difference_update(names)
                page = {name: state for name in names if (state := self._checkpoint_of(name)) is not None}
                try:
                    if page:
                        await self._send(page)
                except errors.MusterError:
                    self.due.update(page)
                    raise

    async def _send(self, page: Page) -> None:
        try:
            data = messages.encode(protocol.CheckpointBatch(items=page), "msgpack")
        except messages.MessageTooLarge:
            names = list(page)
            for half in (names[: len(names) // 2], names[len(names) // 2 :]):
                await self._send({name: page[name] for name in half})
            return
        message = await client.exchange_once(self._bus, protocol.checkpoint(self._manager), data)
        for name in client.result_of(message.data)["refused"]:
            self._superseded(name, page[name][0])
