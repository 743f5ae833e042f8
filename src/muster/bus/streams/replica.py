"""Makes the replicas that a broker of a cluster has readable for a broker without one.

Such a broker ignores a stream that is to have several replicas. The number is in a file of each stream. The
checksum of that file is beside it: HighwayHash with 64 bits, keyed with the name of the stream. All functions
block.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

from muster.core import errors

META, SUM = "meta.inf", "meta.sum"
_MASK = (1 << 64) - 1
_MUL0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_MUL1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)


def make_single(store: Path) -> list[str]:
    """Have each stream in a copy of a store say that it has one replica; returns their names."""
    names = []
    for meta in sorted(store.glob(f"*/streams/*/{META}")):
        name, data, path = meta.parent.name, meta.read_bytes(), meta.with_name(SUM)
        if checksum(name, data) != path.read_text():
            raise errors.InvalidInput(
                f"{meta} is damaged, or of another version of the broker", hint="restore a backup instead"
            )
        changed = json.dumps(json.loads(data) | {"num_replicas": 1}).encode()
        meta.write_bytes(changed)
        path.write_text(checksum(name, changed))
        names.append(name)
    return names


def checksum(name: str, data: bytes) -> str:
    """As the server writes it for a file of a stream of this name."""
    key = struct.unpack("<4Q", hashlib.sha256(name.encode()).digest())
    return struct.pack("<Q", _HighwayHash(key).digest(data)).hex()


def _swapped(lane: int) -> int:
    return (lane >> 32 | lane << 32) & _MASK


class _HighwayHash:
    """The portable form of the algorithm, on four lanes of 64 bits."""

    def __init__(self, key: Sequence[int]) -> None:
        self._mul0, self._mul1 = list(_MUL0), list(_MUL1)
        self._v0 = [mul ^ lane for mul, lane in zip(_MUL0, key, strict=True)]
        self._v1 = [mul ^ _swapped(lane) for mul, lane in zip(_MUL1, key, strict=True)]

    def digest(self, data: bytes) -> int:
        whole = len(data) & ~31
        for at in range(0, whole, 32):
            self._update(struct.unpack_from("<4Q", data, at))
        if whole < len(data):
            self._update_rest(data[whole:])
        for _ in range(4):
            self._update([_swapped(self._v0[lane]) for lane in (2, 3, 0, 1)])
        return (self._v0[0] + self._v1[0] + self._mul0[0] + self._mul1[0]) & _MASK

    def _update(self, lanes: Sequence[int]) -> None:
        v0, v1, mul0, mul1 = self._v0, self._v1, self._mul0, self._mul1
        for lane in range(4):
            v1[lane] = (v1[lane] + mul0[lane] + lanes[lane]) & _MASK
            mul0[lane] ^= (v1[lane] & 0xFFFFFFFF) * (v0[lane] >> 32)
            v0[lane] = (v0[lane] + mul1[lane]) & _MASK
            mul1[lane] ^= (v0[lane] & 0xFFFFFFFF) * (v1[lane] >> 32)
        for source, target in ((v1, v0), (v0, v1)):
            for low in (0, 2):
                add0, add1 = _zipped(source[low + 1], source[low])
                target[low] = (target[low] + add0) & _MASK
                target[low + 1] = (target[low + 1] + add1) & _MASK

    def _update_rest(self, rest: bytes) -> None:
        size, odd = len(rest), len(rest) & 3
        for lane in range(4):
            self._v0[lane] = (self._v0[lane] + (size << 32) + size) & _MASK
            low, high = (_rotated(half, size) for half in (self._v1[lane] & 0xFFFFFFFF, self._v1[lane] >> 32))
            self._v1[lane] = high << 32 | low
        whole = size & ~3
        packet = bytearray(32)
        packet[:whole] = rest[:whole]
        if size & 16:
            packet[28:] = rest[size - 4 :]
        elif odd:
            last = rest[whole:]
            packet[16:19] = bytes((last[0], last[odd >> 1], last[odd - 1]))
        self._update(struct.unpack("<4Q", packet))


def _rotated(half: int, count: int) -> int:
    return (half << count | half >> (32 - count)) & 0xFFFFFFFF


def _zipped(v1: int, v0: int) -> tuple[int, int]:
    add0 = (
        ((v0 & 0xFF000000) | (v1 & 0xFF00000000)) >> 24
        | ((v0 & 0xFF0000000000) | (v1 & 0xFF000000000000)) >> 16
        | (v0 & 0xFF0000)
        | (v0 & 0xFF00) << 32
        | (v1 & 0xFF00000000000000) >> 8
        | v0 << 56
    )
    add1 = (
        ((v1 & 0xFF000000) | (v0 & 0xFF00000000)) >> 24
        | (v1 & 0xFF0000)
        | (v1 & 0xFF0000000000) >> 16
        | (v1 & 0xFF00) << 24
        | (v0 & 0xFF000000000000) >> 8
        | (v1 & 0xFF) << 48
        | (v0 & 0xFF00000000000000)
    )
    return add0 & _MASK, add1 & _MASK
