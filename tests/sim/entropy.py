"""Time and randomness of a simulation: the modules `time`, `random`, `secrets` and `os` follow the seed.

The services call these modules directly.  In a simulation they get virtual time (the wall clock of their own
host, which may be wrong) and numbers of the seed.  Import this module before Muster: default arguments such
as ``clock=time.time`` are then virtual too.  The order of sets of strings depends on PYTHONHASHSEED, which
only a new interpreter can set: `require_fixed_hashes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

from tests.sim import process

HASH_SEED = "0"
EPOCH_NS = 1_700_000_000_000_000_000  # as of the simulated network


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
    current = process.CURRENT.get()
    return EPOCH_NS + monotonic_ns() + (current.clock_ahead_ns() if current is not None else 0)


def wall_s() -> float:
    return wall_ns() / 1e9


def _install(name: str, simulated: Callable[[], float]) -> None:
    real = getattr(time, name)

    def now() -> float:
        running = asyncio._get_running_loop()
        return float(real()) if not getattr(running, "simulates", False) else simulated()

    def now_ns() -> int:
        running = asyncio._get_running_loop()
        return int(real()) if not getattr(running, "simulates", False) else int(simulated())

    setattr(time, name, now_ns if name.endswith("_ns") else now)


for _name, _simulated in (
    ("time", wall_s),
    ("time_ns", wall_ns),
    ("monotonic", monotonic_s),
    ("monotonic_ns", monotonic_ns),
    ("perf_counter", monotonic_s),
):
    _install(_name, _simulated)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    chance = random.Random(f"{seed}/entropy")
    state = random.getstate()
    random.seed(f"{seed}/random")

    def token_bytes(nbytes: int | None = None) -> bytes:
        return chance.randbytes(32 if nbytes is None else nbytes)

    with (
        mock.patch.multiple(secrets, token_bytes=token_bytes, randbits=chance.getrandbits),
        mock.patch.object(os, "urandom", chance.randbytes),
        mock.patch.object(os, "fsync", return_value=None),  # the disk is simulated: what is written stays
    ):
        try:
            yield
        finally:
            random.setstate(state)
