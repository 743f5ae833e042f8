"""Random changes of inputs, from a seed: for the short run without atheris, and for network endpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence

TOKENS = (
    *(b"", b"\x00", b"\xff" * 8, b"\xc3\x28", b"\xf0\x9f\x92\xa9", "\u2028".encode(), b"%00", b"../"),
    *(b"(" * 200, b"[" * 2000, b"{" * 200, b"<a>" * 200, b"NOT " * 100, b"- " * 50, b"&a;", b"<![CDATA["),
    *(b"0", b"-1", b"9" * 40, b"1e999", b"NaN", b"0x", b"null", b"TRUE", b"*", b"#", b">", b".", b"\r\n"),
    *(b"'", b'"', b"\\", b"\x81", b"\xdf" + b"\xff" * 4, b"\xdd\x7f\xff\xff\xff", b"\xc6" + b"\xff" * 4),
    b"\xd0" + b"\xff" * 8,
)


def mutate(chance: random.Random, seeds: Sequence[bytes], *, bytes_max: int = 8192) -> bytes:
    """One of the seeds with up to eight changes."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 8)):
        at = chance.randint(0, len(data))
        match chance.randrange(6):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + chance.randint(1, 16)]
            case 2:
                data[at:at] = chance.choice(TOKENS)
            case 3:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
            case 4:
                other = chance.choice(seeds)
                start = chance.randint(0, len(other))
                data[at:at] = other[start : start + chance.randint(1, 64)]
            case _:
                end = chance.randint(at, len(data))
                data[at:at] = data[at:end] * chance.randint(1, 4)
    return bytes(data[:bytes_max])
