"""Large bodies: stored in chunks before their message is sent, and read when the application receives it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from muster.message import messages, protocol

if TYPE_CHECKING:
    from muster.message.client import dispatcher_connection as connection_


class BodyUpload:
    def __init__(self, connection: connection_.DispatcherConnection) -> None:
        self._connection = connection
        self._id = secrets.token_hex(16)
        self._chunks: list[int] = []
        self._size = 0

    async def add(self, data: bytes) -> None:
        for at in range(0, len(data), protocol.CHUNK_BYTES):
            part = data[at : at + protocol.CHUNK_BYTES]
            request = protocol.StoreChunk(self._connection.name, self._id, part)
            self._chunks.append((await self._connection.request(request)).count)
            self._size += len(part)

    @property
    def body(self) -> messages.LargeBody:
        return messages.LargeBody(self._id, self._size, self._chunks)


async def upload(
    connection: connection_.DispatcherConnection, send: protocol.SendMessage
) -> protocol.SendMessage:
    """The message with its payload stored separately, if it is too large."""
    if len(send.data) <= protocol.LARGE_BYTES:
        return send
    body = BodyUpload(connection)
    await body.add(send.data)
    meta = messages.decode_meta(send.meta)
    meta.large = body.body
    return msgspec.structs.replace(send, meta=messages.encode_meta(meta).decode(), data=b"")


async def download(
    connection: connection_.DispatcherConnection, body: messages.LargeBody
) -> AsyncIterator[bytes]:
    """The chunks of a body. Raises `errors.NotFound` if it is not stored any more."""
    for chunk in body.chunks:
        yield (await connection.request(protocol.ReadChunk(body.id, chunk))).data


async def load(
    connection: connection_.DispatcherConnection, unloaded: messages.JmsMessage
) -> messages.JmsMessage:
    """The complete message of one whose body was not read."""
    meta = unloaded.unloaded
    if meta is None or meta.large is None:
        return unloaded
    data = b"".join([chunk async for chunk in download(connection, meta.large)])
    loaded = messages.message_from_meta(msgspec.structs.replace(meta, large=None), data, unloaded.destination)
    loaded.delivery_count, loaded.redelivered = unloaded.delivery_count, unloaded.redelivered
    return loaded
