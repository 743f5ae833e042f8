"""Time and randomness of a simulation: the modules `time`, `random`, `secrets` and `os` follow the seed.

The services call these modules directly.  While `seeded` is active they get virtual time (the wall clock of
their own host, which may be wrong) and numbers of the seed.  The order of sets of strings depends on
PYTHONHASHSEED, which only a new interpreter can set: `require_fixed_hashes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import sys
import time
from collections.abc import Iterator
from unittest import mock

from muster.bus.memory import network
from tests.sim import loop

HASH_SEED = "0"


def require_fixed_hashes() -> None:
    """Start this interpreter again if its hashes are random."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        arguments = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": HASH_SEED})


def monotonic_s() -> float:
    return asyncio.get_running_loop().time()


def monotonic_ns() -> int:
    return round(monotonic_s() * 1e9)


def wall_ns() -> int:
    """The wall clock of the current process."""
    process = loop.CURRENT.get()
    return network.EPOCH_NS + monotonic_ns() + (process.clock_ahead_ns() if process is not None else 0)


def wall_s() -> float:
    return wall_ns() / 1e9


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    chance = random.Random(f"{seed}/entropy")
    state = random.getstate()
    random.seed(f"{seed}/random")

    def token_bytes(nbytes: int | None = None) -> bytes:
        return chance.randbytes(32 if nbytes is None else nbytes)

    with (
        mock.patch.multiple(
            time,
            time=wall_s,
            time_ns=wall_ns,
            monotonic=monotonic_s,
            monotonic_ns=monotonic_ns,
            perf_counter=monotonic_s,
        ),
        mock.patch.multiple(secrets, token_bytes=token_bytes, randbits=chance.getrandbits),
        mock.patch.object(os, "urandom", chance.randbytes),
    ):
        try:
            yield
        finally:
            random.setstate(state)
