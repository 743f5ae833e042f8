"""How one measures here.

On a shared machine a figure is disturbed in one direction only: something else ran.  So we take the best of
several rounds, and let us and the peer take turns, so that a slow minute hits both.  Everything is bounded in
count and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import pathlib
import resource
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from muster.core import errors

T = TypeVar("T")
Better = Literal["lower", "higher"]
Act = Callable[[int], Awaitable[object]]

ROOT = pathlib.Path(__file__).parents[1]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def best(values: Sequence[float], better: Better) -> float:
    return min(values) if better == "lower" else max(values)


def in_turns(
    sides: Mapping[str, Callable[[], T]], *, rounds: int, seconds_max: float = 60.0
) -> dict[str, list[T]]:
    """Every side once a round, each round in the other order, until the rounds or the time are used up."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    deadline = time.monotonic() + seconds_max
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        for name in sorted(sides, key=list(sides).index, reverse=number % 2 == 1):
            results[name].append(sides[name]())
    return results


def run_fast(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop, where it is installed: on both sides of a comparison then."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print how long a part of a benchmark took, so that a long run shows where it is."""
    began = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of this process, all threads: not changed by other busy processes."""
    start = time.process_time()
    function()
    return time.process_time() - start


def nanoseconds_a_call(
    function: Callable[[], object], *, rounds: int = 7, round_s: float = 0.1, calls_max: int = 10_000_000
) -> float:
    """Of one call of something small: the best round, of as many calls as fit into ``round_s``."""
    calls = 1
    while calls < calls_max and (took_s := _loop(function, calls)) < round_s / 4:
        calls = min(calls_max, calls * 4 if took_s < round_s / 20 else calls * 2)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return min(_loop(function, calls) for _ in range(rounds)) / calls * 1e9
    finally:
        if was_enabled:
            gc.enable()


def _loop(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def raise_file_limit(expected: int) -> int:
    """Let this process and its children open so many files, as far as we may. The limit there is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < expected and os.geteuid() == 0:
        hard = expected
    soft = expected if hard == resource.RLIM_INFINITY else min(expected, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def pipeline_command(folder: pathlib.Path, url: str, *overrides: str) -> list[str]:
    """The pipeline as a process, with its data in ``folder``."""
    place = folder.absolute()
    where = (f"domain.data_dir={place.parent}", f"domain.name={place.name}")
    options = [word for override in (*where, *overrides) for word in ("--set", override)]
    words = ["run", "pipeline", "--home", str(place), "--server", url, *options]
    return [sys.executable, "-m", "muster", *words]


def resident_bytes(pid: int) -> int:
    """The memory that a process really has."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise errors.NotFound(f"process {pid} has no memory: it has ended")


class Worker:
    """A function of one of our modules in a separate process, controlled by JSON lines.

    ``python -m MODULE ARGUMENT…``: what it prints we `hear`, what we `tell` it reads.  Its errors go to the
    file ``log``, or to ours.
    """

    def __init__(self, module: str, *arguments: object, log: pathlib.Path | None = None) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        self.name = f"{module} {' '.join(map(str, arguments))}"
        with contextlib.ExitStack() as stack:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("ab")) if log else None,
                env={**os.environ, "PYTHONPATH": path},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, *, timeout_s: float = 60.0) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise errors.TimedOut(f"{self.name} printed nothing for {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise errors.Unavailable(f"{self.name} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
