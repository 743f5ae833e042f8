"""``make test`` repeats, alone, the few tests that failed among all others.

Several brokers, domains and Sparks run at once on few cores. A test that fails there and passes alone is
unstable: either it or Muster depends on timing. It is named in the last lines, and is a defect to fix, but
it does not hide what the other thousands have shown. The run fails if a test fails again, or if more than
`UNSTABLE_MAX` failed. ``make test STABLE=1`` repeats nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

UNSTABLE_MAX = 3
LIST = "MUSTER_FAILED_TESTS"  # names the file of the failed tests


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if path := os.environ.get(LIST):
        failed = {
            report.nodeid
            for outcome in ("failed", "error")
            for report in terminalreporter.stats.get(outcome, ())
        }
        Path(path).write_bytes(msgspec.json.encode(sorted(failed)))


def run(*arguments: str, failed: Path) -> int:
    """Run pytest, and the tests that failed once more. The exit code."""
    failed.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest"]
    code = subprocess.run(
        [*command, *arguments], env=os.environ | {LIST: str(failed)}, check=False
    ).returncode
    if code != pytest.ExitCode.TESTS_FAILED or os.environ.get("STABLE") or not failed.exists():
        return code
    names = msgspec.json.decode(failed.read_bytes(), type=list[str])
    if not 0 < len(names) <= UNSTABLE_MAX:
        return code
    sys.stdout.write(f"\nrepeated alone: {', '.join(names)}\n")
    sys.stdout.flush()
    again = subprocess.run([*command, "-n", "0", "-m", "slow or not slow", *names], check=False).returncode
    if again == 0:
        sys.stdout.write(
            "".join(f"UNSTABLE {name}: failed among the others, passed alone\n" for name in names)
        )
    return again


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:], failed=Path(".pytest_cache", "failed.json").absolute()))
