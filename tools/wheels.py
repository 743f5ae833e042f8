"""Installs the wheel in bare environments: without extras, and with each extra alone.

    python -m tools.wheels [EXTRA…]        "none" stands for no extra; all by default

Each environment is new and contains only what the wheel requires, at the pinned versions; a download whose
hash is not in a lock file is refused. In each, every command either works or names the extra that it needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from muster.cli import extras
from muster.core import errors
from tools import supply

BARE = "none"
BUG = errors.InvariantViolation.exit_code
#: Commands that need an extra, and the one they need first.
NEED = {
    "channel --server nats://127.0.0.1:1": "monitor",
    "sensor --server nats://127.0.0.1:1": "monitor",
    "simulate sensors --server nats://127.0.0.1:1": "monitor",
    "history": "history",
    "pipeline run": "spark",
    "gateway amqp": "amqp",
}
WORK = ("--help", "version", "config validate", "status", "get", "creds list")


def main(chosen: list[str]) -> int:
    project = tomllib.loads((supply.ROOT / "pyproject.toml").read_text())["project"]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel = build(place)
        for extra in chosen or [BARE, *project["optional-dependencies"]]:
            environment = place / extra
            count = install(wheel, extra, environment)
            faults = check(extra, environment, place / f"home-{extra}")
            print(f"{extra:10} {count:3} distributions  {'; '.join(faults) or 'ok'}", flush=True)
            problems += faults
    return 1 if problems else 0


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder)]
    subprocess.run([*command, str(supply.ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("muster_fabric-*.whl")
    return wheel


def install(wheel: Path, extra: str, environment: Path) -> int:
    """Install the wheel; returns the number of distributions that it brings."""
    pins = [pin for lock in supply.LOCKS for pin in supply.pins(supply.ROOT / lock)]
    constraints, report = environment.with_suffix(".txt"), environment.with_suffix(".json")
    lines = {pin.text.splitlines()[0].rstrip(" \\") for pin in pins}  # name==version ; marker
    constraints.write_text("\n".join(sorted(lines)))
    venv.create(environment, with_pip=True)
    target = str(wheel) if extra == BARE else f"{wheel}[{extra}]"
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    expected = [*pip, "--report", str(report), "-c", str(constraints), target]
    subprocess.run([*expected, "--dry-run"], check=True)
    known = {digest for pin in pins for digest in pin.hashes}
    items = json.loads(report.read_text())["install"]
    for item in items:
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not item["is_direct"] and digest not in known:
            raise errors.Refused(f"{item['metadata']['name']}: the hash of the download is in no lock file")
    subprocess.run(expected, check=True)
    return len(items)


def check(extra: str, environment: Path, home: Path) -> list[str]:
    """What is wrong in an environment with this extra alone."""
    faults = []
    made = run(environment, home, "init --port 0")
    if made.returncode:
        faults.append(f"init: {made.stderr}")
    for words in WORK:
        done = run(environment, home, words)
        if done.returncode == BUG or "Traceback" in done.stderr or "muster-fabric[" in done.stderr:
            faults.append(f"{words}: {done.stderr.strip()}")
    for words, needed in NEED.items():
        done = run(environment, home, words)
        if done.returncode == BUG or "Traceback" in done.stderr:
            faults.append(f"{words}: {done.stderr.strip()}")
        elif extra == BARE and f"muster-fabric[{needed}]" not in done.stderr:
            faults.append(f"{words}: does not name muster-fabric[{needed}]: {done.stderr.strip()}")
        elif extra == needed and f"muster-fabric[{needed}]" in done.stderr:
            faults.append(f"{words}: needs more than its extra: {done.stderr.strip()}")
    return faults


def run(environment: Path, home: Path, words: str) -> subprocess.CompletedProcess[str]:
    clean = {"HOME": str(home.parent), "MUSTER_HOME": str(home), "PATH": os.environ["PATH"]}
    command = [str(environment / "bin" / "muster"), *words.split()]
    try:
        return subprocess.run(
            command, env=clean, cwd=home.parent, capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:  # it serves
        return subprocess.CompletedProcess(command, 0, "", "")


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - {BARE, *extras.EXTRAS.values()}
    sys.exit(f"unknown extras: {', '.join(sorted(unknown))}" if unknown else main(sys.argv[1:]))
