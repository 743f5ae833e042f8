"""A session of an AMQP client, and the bytes that it sends."""

from __future__ import annotations

import asyncio
import contextlib


def exchange(port: int) -> None:
    from proton import Message
    from proton.utils import BlockingConnection

    connection = BlockingConnection(f"amqp://127.0.0.1:{port}", timeout=20)
    try:
        connection.create_sender("queue:fuzz").send(Message(durable=True, body="correct"))
        receiver = connection.create_receiver("queue:fuzz", credit=1)
        receiver.receive(timeout=20)
        receiver.accept()
    finally:
        connection.close()


async def recorded(port: int) -> list[bytes]:
    """What a client sends in a session, from the beginning to different points."""
    sent = bytearray()
    marks: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, keep: bool) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    if keep:
                        sent.extend(data)
                        marks.append(len(sent))
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, to, keep=True), copy(there, writer, keep=False))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await asyncio.to_thread(exchange, server.sockets[0].getsockname()[1])
    return [bytes(sent[:mark]) for mark in marks] + [bytes(sent)] * len(marks)
