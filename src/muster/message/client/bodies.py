"""Large bodies: stored in chunks before their message is sent, and read when the application receives it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

import msgspec

from muster.message import codec, messages, protocol

if TYPE_CHECKING:
    from muster.message.client import dispatcher_connection, partition_link


AT_ONCE: Final = 4  # chunks that are stored or read at the same time


class BodyUpload:
    def __init__(self, link: partition_link.PartitionLink) -> None:
        self._link = link
        self._id = secrets.token_hex(16)
        self._chunks: list[int] = []
        self._size = 0

    async def add(self, data: bytes) -> None:
        for at in range(0, len(data), AT_ONCE * protocol.CHUNK_BYTES):
            end = min(len(data), at + AT_ONCE * protocol.CHUNK_BYTES)
            parts = [
                data[begin : begin + protocol.CHUNK_BYTES] for begin in range(at, end, protocol.CHUNK_BYTES)
            ]
            self._chunks += await asyncio.gather(*map(self._store, parts))
            self._size += end - at

    async def _store(self, part: bytes) -> int:
        request = protocol.StoreChunk(self._link.connection.name, self._id, part, self._link.partition)
        return (await self._link.request(request)).count

    @property
    def body(self) -> messages.LargeBody:
        return messages.LargeBody(self._id, self._size, self._chunks, self._link.partition)


async def upload(link: partition_link.PartitionLink, send: protocol.SendMessage) -> protocol.SendMessage:
    """The message with its payload stored separately, if it is too large."""
    if len(send.data) <= protocol.LARGE_BYTES:
        return send
    body = BodyUpload(link)
    await body.add(send.data)
    meta = messages.decode_meta(send.meta)
    meta.large = body.body
    return msgspec.structs.replace(send, meta=messages.encode_meta(meta).decode(), data=b"")


async def download(
    connection: dispatcher_connection.DispatcherConnection, body: messages.LargeBody
) -> AsyncIterator[bytes]:
    """The chunks of a body. Raises `errors.NotFound` if it is not stored any more."""

    async def read(chunk: int) -> bytes:
        return (await connection.request(protocol.ReadChunk(body.id, chunk, body.partition))).data

    for at in range(0, len(body.chunks), AT_ONCE):
        for data in await asyncio.gather(*map(read, body.chunks[at : at + AT_ONCE])):
            yield data


async def load(
    connection: dispatcher_connection.DispatcherConnection, unloaded: messages.JmsMessage
) -> messages.JmsMessage:
    """The complete message of one whose body was not read."""
    meta = unloaded.unloaded
    if meta is None or meta.large is None:
        return unloaded
    data = b"".join([chunk async for chunk in download(connection, meta.large)])
    loaded = codec.message_from_meta(msgspec.structs.replace(meta, large=None), data, unloaded.destination)
    loaded.delivery_count, loaded.redelivered = unloaded.delivery_count, unloaded.redelivered
    return loaded
