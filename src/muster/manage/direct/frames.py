"""What travels on a direct link: the handshake, then frames with messages."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from muster.core import errors

FRAME_BYTES_MAX = 4 << 20
HANDSHAKE_BYTES_MAX = 64 << 10  # of a frame whose sender is not authenticated yet
HANDSHAKE_S = 5.0


class LinkChallenge(msgspec.Struct, frozen=True):
    nonce: str
    manager: str


class LinkProof(msgspec.Struct, frozen=True):
    jwt: str
    signature: bytes


class DirectFrame(msgspec.Struct, frozen=True, array_like=True):
    """``reply`` names a request; the ``subject`` of its reply frame is that name."""

    subject: str
    reply: str
    data: bytes


def write(writer: asyncio.StreamWriter, value: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(value)
    writer.write(len(data).to_bytes(4, "big") + data)


async def read(reader: asyncio.StreamReader, kind: type[Any], *, bytes_max: int = FRAME_BYTES_MAX) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > bytes_max:
        raise errors.InvalidInput(f"a frame of {size} bytes exceeds the limit")
    try:
        return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"not a frame: {error}") from error
