"""What travels on a direct connection: first the handshake, then messages.

    client                               listener
    DirectHello(nonce)              ->
                                    <-   DirectChallenge(identity, nonce, addresses, answer)
    DirectProof(user JWT, answer)   ->
                                    <-   WELCOME, or REFUSED with the reason and the end

Each frame is four bytes with its size, and MessagePack. A frame without a subject controls the connection;
`DirectFrame.reply` is then its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from muster.core import errors

HANDSHAKE_BYTES_MAX = 16 << 10  # of a frame whose sender is not authenticated yet
OVERHEAD_BYTES_MAX = 16 << 10  # of a frame, beyond the maximum size of a message
HANDSHAKE_S = 5.0

PING, PONG, WELCOME, REFUSED = "ping", "pong", "welcome", "refused"

T = TypeVar("T")


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process accepts direct connections, as it announces it over the bus.

    ``addresses``: ``HOST:PORT`` of each of its names. ``key``: the public key of its credentials. Without it
    (an address that a user configured) the certificate alone shows that it is the domain's.
    """

    identity: str = ""
    addresses: tuple[str, ...]
    key: str = ""
    tls: bool = True


class DirectHello(msgspec.Struct, frozen=True, array_like=True):
    nonce: str


class DirectChallenge(msgspec.Struct, frozen=True, array_like=True):
    identity: str
    nonce: str
    addresses: tuple[str, ...]
    answer: bytes


class DirectProof(msgspec.Struct, frozen=True, array_like=True):
    user_jwt: str
    answer: bytes


class DirectFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message; ``headers`` as a broker sends them."""

    subject: str
    data: bytes
    reply: str = ""
    headers: bytes | None = None


def signed_by_listener(nonce: str, addresses: Iterable[str]) -> str:
    """What a listener signs: its addresses too, so no other process can pass the answer on as its own. In
    JSON, because the client chooses the nonce: it must not be read as a part of the addresses."""
    return f"muster direct listener {msgspec.json.encode([nonce, *addresses]).decode()}"


def signed_by_client(nonce: str, listener: str) -> str:
    return f"muster direct client {msgspec.json.encode([nonce, listener]).decode()}"


_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (DirectHello, DirectChallenge, DirectProof, DirectFrame)
}


def encode(value: msgspec.Struct) -> bytes:
    data = _encode(value)
    return len(data).to_bytes(4, "big") + data


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    try:
        value: T = _decoders[kind].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"not a {kind.__name__}: {error}") from error
    return value


class FrameReader:
    """Divides what arrives into frames. Nothing is kept of a frame that is larger than ``bytes_max``."""

    def __init__(self, bytes_max: int = HANDSHAKE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._kept = bytearray()  # the beginning of a frame
        self._needed_bytes = 0

    @property
    def kept_bytes(self) -> int:
        return len(self._kept)

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The content of each frame that is complete; `errors.InvalidInput` for one that is too large."""
        if self._kept:
            self._kept += data
            if len(self._kept) < self._needed_bytes:
                return
            data, self._kept = bytes(self._kept), bytearray()
        self._needed_bytes = 4
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= 4:
            size = int.from_bytes(view[at : at + 4], "big")
            if size > self.bytes_max:
                raise errors.InvalidInput(
                    f"a frame of {size} bytes: at most {self.bytes_max} are accepted now"
                )
            if end - at < 4 + size:
                self._needed_bytes = 4 + size
                break
            yield view[at + 4 : at + 4 + size]
            at += 4 + size
        self._kept += view[at:]
