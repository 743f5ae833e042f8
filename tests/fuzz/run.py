"""Coverage-guided fuzzing with atheris: ``python -m tests.fuzz.run TARGET,… [N]``, or `make fuzz`.

A target is a parser (`targets`) or a network endpoint (`network`). Each parser runs in a process of its own,
with a limit on memory and on the CPU time of one input. The input that fails is printed and stored in
``tests/artefacts/fuzz``; add it to ``REGRESSIONS`` in `test_targets`. Inputs that reached new code are kept
there too, and the next run starts from them.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from tests.fuzz import result

ARTEFACTS = pathlib.Path(__file__).parents[1] / "artefacts" / "fuzz"
INPUTS = 1_000_000
INPUT_S_MAX = 10  # of CPU: a process that waits for its turn is not slow
HANGING_S_MAX = 3600  # of wall time, for code that no signal interrupts
MEMORY_MB_MAX = 2048
INPUT_BYTES_MAX = 4096


def fuzz(name: str, inputs: int) -> None:
    """Fuzz one target in this process, which ends."""
    atheris: Any = importlib.import_module("atheris")  # optional, and without types
    with atheris.instrument_imports(include=["muster"]):
        from tests.fuzz import targets

    corpus = ARTEFACTS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.TARGETS[name].seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [
        f"-runs={inputs}",
        f"-timeout={HANGING_S_MAX}",
        f"-rss_limit_mb={MEMORY_MB_MAX}",
        f"-max_len={INPUT_BYTES_MAX}",
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


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"this input took {INPUT_S_MAX} s of CPU time")


def main(names: list[str], inputs: int, *, save: bool) -> int:
    """Fuzz each target in a process of its own; the number of those that failed."""
    failed = 0
    for name in names:
        started = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz.run", "--here", name, str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - started
        sys.stdout.write(
            f"{name:20} {inputs:>9,} inputs {took_s:7.1f} s  {'ok' if not done.returncode else 'FAILED'}\n"
        )
        sys.stdout.flush()
        if save:
            verdict = "ok" if not done.returncode else "failed"
            result.save(result.FuzzRow(name=name, kind="parser", inputs=inputs, result=verdict))
        if done.returncode:
            failed += 1
            sys.stdout.write(f"{done.stdout[-2000:]}{done.stderr[-4000:]}\n")
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        fuzz(sys.argv[2], int(sys.argv[3]))
    else:
        from tests.fuzz import network, targets

        options = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
        options.add_argument(
            "targets", nargs="?", default="", help="names, separated by commas; all by default"
        )
        options.add_argument("inputs", nargs="?", type=int)
        options.add_argument(
            "--save", action="store_true", help="add the results to those of docs/testing.md"
        )
        chosen = options.parse_args()
        names = list(filter(None, chosen.targets.split(",")))
        parsers = [name for name in targets.TARGETS if name in (names or targets.TARGETS)]
        endpoints = [name for name in names if name not in targets.TARGETS]
        failed = main(parsers, chosen.inputs or INPUTS, save=chosen.save)
        if endpoints or not names:
            failed += network.report(endpoints, chosen.inputs or network.INPUTS, save=chosen.save)
        sys.exit(min(1, failed))
