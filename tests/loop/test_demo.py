"""The output of the worm demo: in order, fitting a terminal, and no process or file left."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cli import driver

COLUMNS = 80
STORY = (
    *("domain", "dashboard", "trust", "fleet", "spark", "worm", "alert", "command", "killed"),
    *("contained", "healthy"),
)
SUMMARY = (
    *("to detect", "to notify", "to contain", "to heal", "infected", "commands", "missed", "reports"),
    *("forged", "killed"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def words(home: Path) -> list[str]:
    return driver.command_line("demo", "worm", "--fleet", "1000", "--once", "--home", home)


def test_the_demo_prints_its_steps_and_a_summary_and_leaves_nothing(tmp_path: Path):
    for _ in range(2):  # and runs again at once
        done = subprocess.run(
            words(tmp_path / "demo"),
            env=driver.environment(),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line for line in lines if len(line) > COLUMNS] == []
        assert "Traceback" not in done.stdout + done.stderr
        scenes = [match[1] for line in lines if (match := re.match(r" {0,9}([a-z]+)  \S", line))]
        assert tuple(dict.fromkeys(scene for scene in scenes if scene in STORY)) == STORY
        summary = done.stdout.partition("\n\n")[2]
        assert [line for line in SUMMARY if f"\n{line}  " not in f"\n{summary}"] == []
        assert re.search(r"^missed +0, repeated 0, dropped", summary, re.MULTILINE)
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path):
    with subprocess.Popen(
        words(tmp_path / "demo"), env=driver.environment(), stdout=subprocess.PIPE, text=True
    ) as story:
        assert story.stdout is not None
        for line in story.stdout:
            if "     trust  " in line:
                break
        family = [psutil.Process(story.pid), *psutil.Process(story.pid).children(recursive=True)]
        story.send_signal(signal.SIGINT)
        assert story.wait(timeout=120) == 0
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        assert alive == []
    assert list(tmp_path.iterdir()) == []
