from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import driver


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_its_shell_reads(shell, muster):
    script = muster("completion", shell).out
    assert "_MUSTER_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=True)


def completed(words: str, index: int, **extra: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "muster"],
        env={
            **driver.environment(),
            **extra,
            "_MUSTER_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(index),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_and_their_options_complete():
    assert completed("muster br", 1) == ["broker"]
    assert completed("muster broker li", 2) == ["list", "link"]
    assert "--links" in completed("muster broker list --l", 3)
    assert completed("muster status -o ", 3) == ["table", "wide", "json", "yaml"]


@pytest.mark.parametrize(
    ("line", "names", "offered"),
    [
        ("muster inform get ", ["a", "$(touch x)", "b c"], ["a", r"\$\(touch\ x\)", r"b\ c"]),
        ("muster sub or", ["orders/>", "orders/eu"], [r"orders/\>", "orders/eu"]),
        ("muster sub 'or", ["orders/>", "orders/eu"], ["orders/eu"]),
        ("muster message browse queue:o", ["queue:orders", "queue:o&"], ["orders", r"o\&"]),
    ],
)
def test_bash_gets_names_that_mean_nothing_to_it(
    line: str, names: list[str], offered: list[str], muster, tmp_path: Path
):
    (tmp_path / "script").write_text(muster("completion", "bash").out)
    (tmp_path / "answer").write_text("".join(f"plain,{name}\n" for name in names))
    (tmp_path / "program").write_text('#!/bin/sh\ncat "$(dirname "$0")/answer"\n')
    (tmp_path / "program").chmod(0o755)
    program = f"""
        . {tmp_path}/script
        COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)}
        _muster_completion {tmp_path}/program
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == offered


def test_names_of_profiles_complete(tmp_path: Path):
    config = {"XDG_CONFIG_HOME": str(tmp_path)}
    (tmp_path / "muster" / "profiles").mkdir(parents=True)
    for name in ("prod", "proof", "lab"):
        (tmp_path / "muster" / "profiles" / f"{name}.toml").touch()
    assert completed("muster status --profile pro", 3, **config) == ["prod", "proof"]
    assert completed("muster profile use l", 3, **config) == ["lab"]
