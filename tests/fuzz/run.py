"""Coverage-guided fuzzing with atheris: ``python -m tests.fuzz.run TARGET [N]``, or `make fuzz`.

A target is a parser (`targets`) or a network endpoint (`network`). Each parser runs in a process of its own,
with a limit on memory and on the time of one input. The input that fails is printed and stored in
``tests/artefacts/fuzz``; add it to ``REGRESSIONS`` in `test_targets`. Inputs that reached new code are kept
there too, and the next run starts from them.
"""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
import time
from typing import Any

ARTEFACTS = pathlib.Path(__file__).parents[1] / "artefacts" / "fuzz"
INPUTS = 1_000_000
INPUT_S_MAX = 10
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
        f"-timeout={INPUT_S_MAX}",
        f"-rss_limit_mb={MEMORY_MB_MAX}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={ARTEFACTS}/{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: targets.run(name, data))
    atheris.Fuzz()


def main(names: list[str], inputs: int) -> int:
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
        if done.returncode:
            failed += 1
            sys.stdout.write(f"{done.stdout[-2000:]}{done.stderr[-4000:]}\n")
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        fuzz(sys.argv[2], int(sys.argv[3]))
    else:
        from tests.fuzz import network, targets

        chosen, limit = (sys.argv[1:2] or [""])[0], int(sys.argv[2]) if len(sys.argv) > 2 else None
        failed = 0
        if chosen in ("", *targets.TARGETS):
            failed += main([chosen] if chosen else list(targets.TARGETS), limit or INPUTS)
        if chosen not in targets.TARGETS:
            failed += network.report(chosen, limit or network.INPUTS)
        sys.exit(min(1, failed))
