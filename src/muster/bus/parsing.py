"""What a broker says, taken apart a block at a time.

nats-py's parser matches each line against patterns and moves its buffer for each message.  Here a block that
was read is walked through once, and a message's reader is called at once: half the time of a message's way
in.  Lines that are no messages (few) go to the connection as nats-py's parser would hand them on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import nats.errors
from nats.protocol import parser

if TYPE_CHECKING:
    from muster.bus import line

LITTLE_BYTES: Final = 8 << 10  # a block below it is no part of a flood
LINE_BYTES_MAX: Final = 1 << 20  # of a line without an end: a broker's INFO may name many brokers


class Parser(parser.Parser):
    def __init__(self, over: line.Line) -> None:
        self._line = over
        self._kept: list[bytes] = []  # the beginning of something whose end has not come
        self._kept_bytes = 0
        self._wanted_bytes = 0  # with fewer than that there is nothing to do
        self._resets = 0

    def __repr__(self) -> str:
        return f"<parser with {self._kept_bytes} bytes kept>"

    def reset(self) -> None:
        self._keep(b"", 0)
        self._resets += 1

    def _keep(self, rest: bytes, wanted_bytes: int) -> None:
        self._kept = [rest] if rest else []
        self._kept_bytes = len(rest)
        self._wanted_bytes = wanted_bytes

    async def parse(self, data: bytes = b"") -> None:
        """Take the next block that came from the broker."""
        if self._kept:
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes < self._wanted_bytes:
                return
            data = b"".join(self._kept)
        resets, hear = self._resets, self._line.hear
        at, size, wanted_bytes = 0, len(data), 0
        try:
            while at < size:
                end = data.find(b"\r\n", at)
                if end < 0:
                    if size - at > LINE_BYTES_MAX:
                        raise nats.errors.ProtocolError
                    break
                words = data[at:end].split()
                what = words[0]
                if what == b"HMSG" or what == b"MSG":
                    begin = end + 2
                    stop = begin + int(words[-1])
                    if stop + 2 > size:
                        wanted_bytes = stop + 2 - at
                        break
                    at = stop + 2
                    if what == b"HMSG":
                        body = begin + int(words[-2])
                        reply = words[3] if len(words) == 6 else b""
                        hear(int(words[2]), words[1], reply, data[body:stop], data[begin:body])
                    else:
                        reply = words[3] if len(words) == 5 else b""
                        hear(int(words[2]), words[1], reply, data[begin:stop], None)
                else:
                    rest, at = data[at + len(what) : end], end + 2
                    await self._other(what, rest)
                    if self._resets != resets:
                        return  # what is left was said over a connection that is no more
        except (ValueError, IndexError) as error:
            raise nats.errors.ProtocolError from error
        self._keep(data[at:], wanted_bytes)
        if size < LITTLE_BYTES:
            for act in self._line.on_little:
                act()

    async def _other(self, what: bytes, rest: bytes) -> None:
        over = self._line
        if what == b"PING":
            await over._process_ping()
        elif what == b"PONG":
            await over._process_pong()
        elif what == b"INFO":
            await over._process_info(json.loads(rest))
        elif what == b"-ERR":
            await over._process_err(rest.strip().decode("utf-8", "replace").lower())
        elif what != b"+OK":
            raise nats.errors.ProtocolError
