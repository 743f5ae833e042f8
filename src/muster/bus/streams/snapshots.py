"""Complete streams as bytes: read from a running broker, and restored with the same sequences.

The broker creates a consistent snapshot and sends it in chunks, each of which is acknowledged. The format of
the bytes (messages with their sequences and times, consumers with their positions) is internal to NATS.
Sequences matter: they are the epochs of leases, the versions of contexts and the positions of readers. Those
after the snapshot are assigned a second time, so a restored stream has a mark (`api.StreamState.restored`).
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
from muster.bus.streams import stream as nats_stream
from muster.core import errors, subjects

PIECE_BYTES = 128 << 10
SILENT_S = 30.0
COMPLETE = "204"  # the status that ends a snapshot of several pieces; one of a single piece ends without any


class StreamSnapshot:
    """``async for piece in snapshot: …``; `config` and `state` describe the stream in the format of NATS."""

    def __init__(self, bus: client.NatsBus, name: str) -> None:
        self._bus = bus
        self._name = subjects.token(name)
        self.config: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # A separate subject: several snapshots can be in progress, also under one identity.
        inbox = f"{subjects.inbox(self._bus.identity)}.snapshot-{secrets.token_hex(8)}"
        async with await self._bus.subscribe(inbox, overflow=api.OverflowPolicy.CLOSE) as pieces:
            question = {"deliver_subject": inbox, "chunk_size": PIECE_BYTES, "jsck": True}
            # One attempt: after a second one the chunks of two snapshots would be mixed.
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
    """Create the stream from its snapshot; `errors.AlreadyExists` if a stream of its name exists."""
    name = subjects.token(config["name"])
    mark = {nats_stream.RESTORED_KEY: secrets.token_hex(8)}
    config = config | {"metadata": (config.get("metadata") or {}) | mark}
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
    """Wait until the stream has reached this sequence.

    The number of messages is not sufficient: leases and other messages with a time to live have expired
    since.
    """
    stream = await bus.open_stream(name)
    async with asyncio.timeout(SILENT_S):
        while True:
            if (await stream.state()).last_sequence >= last:
                return
            await asyncio.sleep(0.05)
