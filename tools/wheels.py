"""Installs the wheel in bare environments: without extras, and with each extra alone.

    python -m tools.wheels [--table] [EXTRA…]      "none" stands for no extra; all by default

Each environment is new and contains only what the wheel requires, at the pinned versions; a download whose
hash is not in a lock file is refused. Commands that need an extra name it where it is missing, and work where
it is installed; without extras every command is tried in a running domain. ``--table`` writes the sizes into
docs/guides/install.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from muster.cli import extras
from muster.core import errors

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-spark.lock", "requirements-amqp.lock")
BARE = "none"
BUG = errors.InvariantViolation.exit_code
PAGE = ROOT / "docs" / "guides" / "install.md"
#: Commands that need an extra, and the one they need first.
NEED = {
    "run channel --server nats://127.0.0.1:1": "monitor",
    "run sensor --server nats://127.0.0.1:1": "monitor",
    "simulate sensors --server nats://127.0.0.1:1": "monitor",
    "history": "history",
    "sql SELECT": "history",
    "run pipeline": "spark",
    "run amqp": "amqp",
}
WORK = ("--help", "version", "config validate", "get", "creds list")


def main(chosen: list[str], table: bool) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    problems, sizes = [], {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel = build(place)
        for extra in chosen or [BARE, *project["optional-dependencies"]]:
            environment = place / extra
            venv.create(environment, with_pip=True)
            before = size_mb(environment)
            count = install(wheel, extra, environment)
            sizes[extra] = size_mb(environment) - before
            faults = check(extra, environment, place / f"home-{extra}")
            outcome = "; ".join(faults) or "ok"
            print(f"{extra:10} {sizes[extra]:5.0f} MB  {count:3} distributions  {outcome}", flush=True)
            problems += faults
    if table:
        write_table(sizes)
    return 1 if problems else 0


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("muster_fabric-*.whl")
    return wheel


def install(wheel: Path, extra: str, environment: Path) -> int:
    """Install the wheel; returns the number of distributions that it brings."""
    locked = "".join((ROOT / lock).read_text() for lock in LOCKS)
    constraints, report = environment.with_suffix(".txt"), environment.with_suffix(".json")
    lines = re.findall(r"^\S+==[^\\\n]+", locked, re.MULTILINE)  # name==version ; marker
    constraints.write_text("\n".join(sorted(set(lines))))
    target = str(wheel) if extra == BARE else f"{wheel}[{extra}]"
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command = [*pip, "--no-compile", "--report", str(report), "-c", str(constraints), target]
    subprocess.run([*command, "--dry-run"], check=True)
    known = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", locked))
    items = json.loads(report.read_text())["install"]
    for item in items:
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not item["is_direct"] and digest not in known:
            raise errors.Refused(f"{item['metadata']['name']}: the hash of the download is in no lock file")
    subprocess.run(command, check=True)
    return len(items)


def size_mb(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6


def check(extra: str, environment: Path, home: Path) -> list[str]:
    """What is wrong in an environment with this extra alone."""
    faults = []
    created = run(environment, home, ["muster", "init", "--port", "0"])
    if created.returncode:
        faults.append(f"init: {created.stderr}")
    if extra == BARE:  # all that can be missing is missing
        faults += check_every_command(environment, home)
    for words in WORK:
        result = run(environment, home, ["muster", *words.split()])
        if is_bug(result) or "muster-fabric[" in result.stderr:
            faults.append(f"{words}: {result.stderr.strip()}")
    for words, needed in NEED.items():
        result = run(environment, home, ["muster", *words.split()])
        if is_bug(result):
            faults.append(f"{words}: {result.stderr.strip()}")
        elif extra == BARE and f"muster-fabric[{needed}]" not in result.stderr:
            faults.append(f"{words}: does not name muster-fabric[{needed}]: {result.stderr.strip()}")
        elif extra == needed and f"muster-fabric[{needed}]" in result.stderr:
            faults.append(f"{words}: needs more than its extra: {result.stderr.strip()}")
    return faults


def check_every_command(environment: Path, home: Path) -> list[str]:
    """What is wrong with commands in a running domain."""
    started = run(environment, home, ["muster", "up", "--detach"], timeout_s=90)
    if started.returncode:
        return [f"up: {started.stderr.strip()}"]
    try:
        swept = run(environment, home, ["python", "-m", "tools.wheel_sweep"], timeout_s=900)
        return [line for line in (*swept.stdout.splitlines(), *swept.stderr.splitlines()[-3:]) if line]
    finally:
        run(environment, home, ["muster", "down"], timeout_s=60)


def is_bug(result: subprocess.CompletedProcess[str]) -> bool:
    return result.returncode == BUG or "Traceback" in result.stderr


def run(
    environment: Path, home: Path, words: list[str], timeout_s: float = 20
) -> subprocess.CompletedProcess[str]:
    clean = {"HOME": str(home.parent), "MUSTER_HOME": str(home), "PATH": os.environ["PATH"]}
    clean["PYTHONPATH"] = str(ROOT)  # tools.wheel_sweep; the package itself is in src/
    command = [str(environment / "bin" / words[0]), *words[1:]]
    try:
        return subprocess.run(
            command,
            env=clean,
            cwd=home.parent,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:  # it serves
        return subprocess.CompletedProcess(command, 0, "", "")


def write_table(sizes: dict[str, float]) -> None:
    """Write the sizes into the table of extras; an extra's size is without what no extra needs."""
    text = PAGE.read_text()
    for extra, size in sizes.items():
        name, own = ("(none)", size) if extra == BARE else (f"`{extra}`", size - sizes.get(BARE, 0.0))
        text = re.sub(
            rf"^(\| {re.escape(name)} \|.*\|) [^|]* \|$",
            rf"\1 {f'{own:,.0f}' if own >= 1 else '<1'} |",
            text,
            flags=re.M,
        )
    PAGE.write_text(text)


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--table"]
    unknown = set(names) - {BARE, *extras.EXTRAS.values()}
    sys.exit(
        f"unknown extras: {', '.join(sorted(unknown))}" if unknown else main(names, "--table" in sys.argv)
    )
