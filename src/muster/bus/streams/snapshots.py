"""Whole streams as bytes: taken from a running broker, and put back under the same sequences.

The broker makes the snapshot of one moment and sends it in pieces, each of which we acknowledge; what the
bytes hold (messages with their sequences and times, consumers with their positions) is its own business.
Sequences matter: they are the epochs of leases, the versions of contexts and the places of readers.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from muster.bus import api
from muster.bus.client import client
from muster.bus.streams import jetstream
from muster.core import errors, subjects

PIECE_BYTES = 128 << 10
SILENT_S = 30.0
COMPLETE = "204"  # the status that ends a snapshot of several pieces; one of a single piece ends without any


class StreamSnapshot:
    """``async for piece in snapshot: …``; `config` and `state` are the broker's words about the stream."""

    def __init__(self, bus: client.NatsBus, name: str) -> None:
        self._bus = bus
        self._name = subjects.token(name)
        self.config: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # A subject of its own: several snapshots can be under way, also under one identity.
        inbox = f"{subjects.inbox(self._bus.identity)}.snapshot-{secrets.token_hex(8)}"
        async with await self._bus.subscribe(inbox, overflow=api.OverflowPolicy.CLOSE) as pieces:
            question = {"deliver_subject": inbox, "chunk_size": PIECE_BYTES, "jsck": True}
            # One try: after a second one the pieces of two snapshots would come mixed.
            answer = await self._bus.storage.call(
                f"STREAM.SNAPSHOT.{self._name}", question, timeout_s=SILENT_S, try_s=SILENT_S
            )
            self.config, self.state = answer["config"], answer["state"]
            while True:
                piece = await pieces.next(timeout_s=SILENT_S)
                if not piece.data:
                    status = piece.headers.get("Status", COMPLETE)
                    if status != COMPLETE:
                        raise errors.Unavailable(f"the snapshot of {self._name} broke off: {status}")
                    return
                yield piece.data
                if piece.reply:
                    await self._bus.publish(piece.reply, b"")


async def restore(
    bus: client.NatsBus, config: dict[str, Any], state: dict[str, Any], pieces: AsyncIterator[bytes]
) -> None:
    """Make the stream anew from its snapshot; `errors.AlreadyExists` if there is one of its name."""
    name = subjects.token(config["name"])
    try:
        answer = await bus.storage.call(
            f"STREAM.RESTORE.{name}",
            {"config": config, "state": state},
            timeout_s=SILENT_S,
            try_s=SILENT_S,
        )
    except jetstream.JetStreamRefused as error:
        if error.err_code == jetstream.NAME_IN_USE:
            raise errors.AlreadyExists(f"the stream {name} is there already") from error
        raise
    to = answer["deliver_subject"]
    async for piece in pieces:
        _check(name, (await bus.request(to, piece, timeout_s=SILENT_S)).data)
    _check(name, (await bus.request(to, b"", timeout_s=SILENT_S)).data)
    await _settled(bus, name, state["last_seq"])


def _check(name: str, answer: bytes) -> None:
    report = json.loads(answer) if answer else {}
    if "error" in report:
        raise jetstream.error_of(report["error"], f"restoring {name}")


async def _settled(bus: client.NatsBus, name: str, last: int) -> None:
    """Until the stream says that it reaches as far.

    How many it holds does not tell: leases, and what else was to live for a time, have ended since.
    """
    stream = await bus.open_stream(name)
    async with asyncio.timeout(SILENT_S):
        while True:
            if (await stream.state()).last_sequence >= last:
                return
            await asyncio.sleep(0.05)
