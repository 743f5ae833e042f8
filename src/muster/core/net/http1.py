"""Strict framing of HTTP/1 requests: a request with an ambiguous end is rejected.

Behind a proxy, two readers of one connection must agree where each request ends, or a client can hide a
second request inside the first.  So a request with Content-Length and Transfer-Encoding, with two lengths,
with a line that ends in a bare LF or CR, with a folded header or with a space before a colon is malformed
here, although HTTP libraries accept some of them.

Pure: bytes in, `MalformedHttp` or nothing out.  The content of requests is for others to read.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from muster.core import errors

HEAD_BYTES_MAX = 16_384
LINE_BYTES_MAX = 256  # of the line before a chunk
TRAILER_BYTES_MAX = 4096
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) HTTP/1\.([01])\Z")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\Z")


class MalformedHttp(errors.InvalidInput):
    code = "malformed-http"


@dataclass(frozen=True, slots=True)
class HttpHead:
    """How the end of a request body is determined."""

    length: int = 0
    chunked: bool = False


def read_head(head: bytes) -> HttpHead:
    """Check a request line and headers, with the empty line at the end."""
    if not head.endswith(b"\r\n\r\n") or _BARE.search(head):
        raise MalformedHttp("a line does not end in CR LF")
    first, *lines = head[:-4].split(b"\r\n")
    request = _REQUEST.match(first)
    if request is None or request[1] == b"CONNECT":
        raise MalformedHttp("not an HTTP request")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        field = _FIELD.match(line)
        if field is None:
            raise MalformedHttp("a malformed or folded header")
        fields.setdefault(field[1].lower(), []).append(field[2].rstrip(b" \t"))
    if len(fields.get(b"host", ())) != 1 and (request[3] == b"1" or b"host" in fields):
        raise MalformedHttp("a request names one host")
    lengths, codings = fields.get(b"content-length", []), fields.get(b"transfer-encoding", [])
    if codings:
        if lengths:
            raise MalformedHttp("Content-Length and Transfer-Encoding exclude each other")
        if request[3] == b"0" or [coding.lower() for coding in codings] != [b"chunked"]:
            raise MalformedHttp("the only transfer encoding is chunked, of HTTP/1.1")
        return HttpHead(chunked=True)
    if len(lengths) > 1 or any(not length.isdigit() or len(length) > 18 for length in lengths):
        raise MalformedHttp("the Content-Length is not one number")
    return HttpHead(int(lengths[0]) if lengths else 0)


class _State(enum.Enum):
    HEAD = "head"
    BODY = "body"  # with a Content-Length
    SIZE = "size"  # the line before a chunk
    CHUNK = "chunk"
    AFTER_CHUNK = "after-chunk"
    TRAILER = "trailer"


class HttpFraming:
    """Follows the requests of one connection, given its bytes in the order in which they come."""

    def __init__(self) -> None:
        self._state = _State.HEAD
        self._buffer = b""
        self._left = 0

    @property
    def is_between(self) -> bool:
        """Whether the connection is between two requests."""
        return self._state is _State.HEAD and not self._buffer

    def feed(self, data: bytes) -> None:
        """`MalformedHttp`; the connection is of no use then."""
        while data:
            match self._state:
                case _State.BODY | _State.CHUNK:
                    taken = min(self._left, len(data))
                    self._left -= taken
                    data = data[taken:]
                    if not self._left:
                        self._go(_State.AFTER_CHUNK if self._state is _State.CHUNK else _State.HEAD)
                case _State.HEAD:
                    data = self._until(data, b"\r\n\r\n", HEAD_BYTES_MAX)
                case _State.SIZE:
                    data = self._until(data, b"\r\n", LINE_BYTES_MAX)
                case _State.AFTER_CHUNK:
                    data = self._until(data, b"\r\n", 2)
                case _State.TRAILER:
                    data = self._until(data, b"\r\n", TRAILER_BYTES_MAX)

    def _until(self, data: bytes, end: bytes, bytes_max: int) -> bytes:
        """Consume ``data`` up to ``end`` and handle the completed element; return the rest."""
        held = len(self._buffer)
        start = max(0, held - len(end) + 1)
        self._buffer += data[: bytes_max + len(end)]
        position = self._buffer.find(end, start)
        # A CR at the very end may be followed by its LF.
        checked = self._buffer[:position] if position >= 0 else self._buffer.removesuffix(b"\r")
        if _BARE.search(checked, max(0, start - 1)):
            raise MalformedHttp("a line does not end in CR LF")
        if position < 0:
            if len(self._buffer) > bytes_max:
                raise MalformedHttp(f"more than {bytes_max} bytes in one part of a request's frame")
            return b""
        piece, self._buffer = self._buffer[: position + len(end)], b""
        self._handle(piece)
        return data[len(piece) - held :]

    def _handle(self, piece: bytes) -> None:
        match self._state:
            case _State.HEAD:
                head = read_head(piece)
                self._left = head.length
                if head.chunked:
                    self._go(_State.SIZE)
                elif head.length:
                    self._go(_State.BODY)
            case _State.SIZE:
                size = _CHUNK.match(piece[:-2])
                if size is None:
                    raise MalformedHttp("a malformed chunk size")
                self._left = int(size[1], 16)
                self._go(_State.CHUNK if self._left else _State.TRAILER)
            case _State.AFTER_CHUNK:
                if piece != b"\r\n":
                    raise MalformedHttp("a chunk does not end where its size states")
                self._go(_State.SIZE)
            case _State.TRAILER:
                if piece == b"\r\n":
                    self._go(_State.HEAD)
                elif _FIELD.match(piece[:-2]) is None:
                    raise MalformedHttp("a malformed trailer")

    def _go(self, state: _State) -> None:
        self._state = state
