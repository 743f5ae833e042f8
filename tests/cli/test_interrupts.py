"""Ctrl-C at any moment ends a command: at once while it starts, in order once it runs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from muster.testing import child_process
from tests.cli import driver

INSTANTS = 3  # of each command; more with MUSTER_INSTANTS
ENDS_S = 25.0
GOOD = (0, 130, -signal.SIGINT)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driver.init(tmp_path_factory.mktemp("interrupted") / "home", settings="")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory):
    home = driver.init(tmp_path_factory.mktemp("shared") / "home")
    assert driver.run("up", "--detach", home=home).code == 0
    yield home
    assert driver.run("down", home=home).code == 0


async def pressed_at(instants: list[float], home: Path, *words: str) -> None:
    """Start it, press after each of ``instants``, and see it end without a traceback."""
    for instant_s in instants:
        env = driver.environment(home)
        async with await child_process.start_muster(*words, env=env, cwd=home.parent) as child:
            if not await child.ends_within(instant_s):
                os.killpg(child.pid, signal.SIGINT)
            code = await child.wait(timeout_s=ENDS_S)
            if any("KeyboardInterrupt" in line for line in child.lines) and not _was_ours(child):
                continue  # Python itself was still starting
            details = f"pressed after {instant_s:.3f} s; {child.tail()}"
            assert code in GOOD, f"ended with {code}, {details}"
            assert not _complaints(list(child.lines)), details


def _was_ours(child: child_process.ChildProcess) -> bool:
    return any(str(driver.SOURCE / "muster" / "cli") in line for line in child.lines)


def _complaints(lines: list[str]) -> list[str]:
    """Tracebacks, but for those that Python prints itself of a press that it swallowed."""
    pairs = zip(["", *lines], lines, strict=False)
    return [line for above, line in pairs if "Traceback" in line and "Exception ignored" not in above]


def instants(seed: str, last_s: float) -> list[float]:
    many = int(os.environ.get("MUSTER_INSTANTS", INSTANTS))
    draw = random.Random(seed)
    return [draw.uniform(0.0, last_s) for _ in range(many)]


@pytest.mark.timeout(300)
async def test_at_any_moment_of_up(place: Path):
    await pressed_at(instants("up", 2.5), place, "up")
    assert (await asyncio.to_thread(driver.run, "status", home=place)).code == 5  # nothing was left running


@pytest.mark.timeout(300)
async def test_at_any_moment_of_a_demo(tmp_path: Path):
    await pressed_at(
        instants("demo", 2.5), tmp_path / "home", "demo", "--once", "--home", str(tmp_path / "d")
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [("sub", "a/>"), ("run", "sensor", "--name", "m"), ("run", "channel", "--name", "c")],
    ids=lambda w: w[-1],
)
async def test_at_any_moment_of_what_stays(up: Path, words: tuple[str, ...]):
    await pressed_at(instants(words[0], 1.5), up, *words)


SWALLOWED = """
import signal, sys
from muster.cli import command, interrupts, main
import click, asyncio

class Loud:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # here Python prints the exception and goes on

def stays():
    Loud()
    command.run(asyncio.sleep(60))

main.COMMANDS = {"stays": main.CommandEntry("x", "x", "x")}
main.RootGroup.get_command = lambda self, ctx, name: click.Command("stays", callback=stays)
sys.argv = ["muster", "stays"]
main.main()
"""


WRAPPED = """
import signal, sys
from muster.cli import main
import click

class Loud:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)  # here Python raises a RuntimeError from it

main.COMMANDS = {"makes": main.CommandEntry("x", "x", "x")}
makes = click.Command("makes", callback=lambda: type("C", (), {"x": Loud()}))
main.RootGroup.get_command = lambda self, ctx, name: makes
sys.argv = ["muster", "makes"]
main.main()
"""


async def test_a_press_while_a_class_is_made_counts():
    async with await child_process.start(sys.executable, "-c", WRAPPED) as child:
        assert await child.wait(timeout_s=30) == 130, child.tail()


async def test_a_press_that_python_swallowed_still_counts():
    async with await child_process.start(sys.executable, "-c", SWALLOWED) as child:
        assert await child.wait(timeout_s=30) == 130
        assert any("Exception ignored" in line for line in child.lines)
