"""Coverage-guided fuzzing with atheris: ``python -m tests.fuzz.run TARGET,… [N]``, or `make fuzz`.

A target is a parser (`targets`) or a network endpoint (`network`). Instrumented modules are imported once;
each parser then runs in a process that is forked from there, as many at a time as there are cores, with a
limit on memory and on the CPU time of one input. Nine tenths of the inputs are short, because the time of a
parser grows with its input and rarely what it finds; the others have up to `LONG_BYTES_MAX` bytes.

The input that fails is printed and stored in ``tests/artefacts/fuzz``; add it to ``REGRESSIONS`` in
`test_targets`. Inputs that reached new code are kept there too, and the next run starts from them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tests.fuzz import result

ARTEFACTS = pathlib.Path(__file__).parents[1] / "artefacts" / "fuzz"
INPUTS = 1_000_000
LONG_SHARE = 0.1
SHORT_BYTES_MIN = 256
LONG_BYTES_MAX = 4096
INPUT_S_MAX = 10  # of CPU: a process that waits for its turn is not slow
HANGING_S_MAX = 3600  # of wall time, for code that no signal interrupts
MEMORY_MB_MAX = 2048
PHASE_INPUTS_MAX = 100_000  # in one process: the instrumentation of comparisons of arrays leaks memory
EXECUTED = re.compile(r"stat::number_of_executed_units: (\d+)")


def instrumented() -> tuple[Any, Any]:
    """The fuzzer and the targets."""
    atheris: Any = importlib.import_module("atheris")  # optional, and without types
    lines = contextlib.redirect_stderr(io.StringIO())  # one for each module
    with lines, atheris.instrument_imports(include=["muster"]):
        from tests.fuzz import targets
    return atheris, targets


@dataclass(frozen=True)
class FuzzPhase:
    """Inputs for one target, up to a length."""

    inputs: int
    bytes_max: int


def phases(seeds: Sequence[bytes], inputs: int) -> list[FuzzPhase]:
    longest = max(map(len, seeds))
    long = int(inputs * LONG_SHARE)
    lengths = (inputs - long, max(SHORT_BYTES_MIN, 2 * longest)), (long, max(LONG_BYTES_MAX, 2 * longest))
    return [
        FuzzPhase(min(PHASE_INPUTS_MAX, count - begin), bytes_max)
        for count, bytes_max in lengths
        for begin in range(0, count, PHASE_INPUTS_MAX)
    ]


class FuzzProcess:
    """A target in a process of its own, one phase after the other."""

    def __init__(self, name: str, inputs: int, parts: tuple[Any, Any]) -> None:
        self.name = name
        self.inputs = inputs
        self.executed = 0
        self.failed = False
        self._parts = parts
        self._target = parts[1].TARGETS[name]
        self._phases = phases(self._target.seeds, inputs)
        self._cpu_s = 0.0
        self._output = ARTEFACTS / f"{name}.log"
        self._fork()

    def _fork(self) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            with self._output.open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            _fuzz(self.name, self._phases[0], *self._parts)

    def ended(self, status: int, cpu_s: float) -> bool:
        """Whether all is done; else the next phase has begun."""
        output = self.output
        self._cpu_s += cpu_s
        self.executed += sum(map(int, EXECUTED.findall(output)))
        self.failed = status != 0 or not EXECUTED.search(output)
        self._phases = self._phases[1:]
        if self.failed or not self._phases:
            return True
        self._fork()
        return False

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def line(self) -> str:
        verdict = "FAILED" if self.failed else "ok"
        return f"{self.name:20} {self.executed:>9,} inputs {self._cpu_s:7.1f} s of CPU  {verdict}"

    def row(self) -> result.FuzzRow:
        verdict = "failed" if self.failed else "ok"
        return result.FuzzRow(name=self.name, kind="parser", inputs=self.executed, result=verdict)


def _fuzz(name: str, phase: FuzzPhase, atheris: Any, targets: Any) -> NoReturn:
    """Fuzz one target in this process, which ends."""
    corpus = ARTEFACTS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.TARGETS[name].seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [
        f"-runs={phase.inputs}",
        f"-timeout={HANGING_S_MAX}",
        f"-rss_limit_mb={MEMORY_MB_MAX}",
        f"-max_len={phase.bytes_max}",
        f"-artifact_prefix={ARTEFACTS}/{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]

    def run(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, INPUT_S_MAX)
        targets.run(name, data)

    signal.signal(signal.SIGPROF, _too_slow)
    atheris.Setup([sys.argv[0], *options, str(corpus)], run)
    atheris.Fuzz()
    os._exit(1)  # not reached: the fuzzer ends the process


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"this input took {INPUT_S_MAX} s of CPU time")


def run_all(names: Sequence[str], inputs: int, parts: tuple[Any, Any], at_once: int) -> Iterator[FuzzProcess]:
    """Each target when it has ended."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    waiting = list(reversed(names))
    running: dict[int, FuzzProcess] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            process = FuzzProcess(waiting.pop(), inputs, parts)
            running[process.pid] = process
        pid, status, used = os.wait4(-1, 0)
        process = running.pop(pid)
        if process.ended(status, used.ru_utime + used.ru_stime):
            yield process
        else:
            running[process.pid] = process


def main(names: list[str], inputs: int | None, *, save: bool, at_once: int) -> int:
    """The number of targets that failed."""
    parts = instrumented()
    parsers = [name for name in names if name in parts[1].TARGETS] if names else list(parts[1].TARGETS)
    endpoints = [name for name in names if name not in parts[1].TARGETS]
    failed = 0
    for process in run_all(parsers, inputs or INPUTS, parts, at_once):
        sys.stdout.write(f"{process.line()}\n")
        if process.failed:
            failed += 1
            sys.stdout.write(f"{process.output[-6000:]}\n")
        sys.stdout.flush()
        if save:
            result.save(process.row())
    if endpoints or not names:  # in a process without instrumentation
        command = [sys.executable, "-m", "tests.fuzz.network", ",".join(endpoints)]
        command += [str(inputs)] if inputs else []
        failed += subprocess.run([*command, *(["--save"] if save else [])], check=False).returncode
    return failed


def arguments(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="make fuzz", description=description)
    options.add_argument("targets", nargs="?", default="", help="names, separated by commas; all by default")
    options.add_argument("inputs", nargs="?", type=int)
    options.add_argument("--save", action="store_true", help="add the results to those of the documentation")
    return options


if __name__ == "__main__":
    options = arguments(__doc__)
    options.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="parsers at a time")
    chosen = options.parse_args()
    names = list(filter(None, chosen.targets.split(",")))
    sys.exit(min(1, main(names, chosen.inputs, save=chosen.save, at_once=chosen.at_once)))
