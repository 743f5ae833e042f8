"""``muster leave``, typed on a machine with an agent."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from muster.app import home
from tests.cli import driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_machine_that_leaves_is_removed_with_its_agent_and_ends(tmp_path: Path):
    first, other = tmp_path / "a", tmp_path / "b"
    network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"

    def muster(place: Path, *words: str) -> str:
        answer = driver.run(*words, home=place)
        assert answer.code == 0, answer.err
        return answer.out

    def agents() -> set[str]:
        return {row["name"] for row in json.loads(muster(first, "get", "--agents", "-o", "json"))}

    options = ("--set", "bus.tls=on", "--set", "web.enabled=false", "--set", "bus.locator=false")
    muster(first, "init", "--name", "fleet", "--host", f"{network}.1", *options)
    muster(first, "up", "--detach")
    try:
        token = tmp_path / "b.token"
        token.write_text(muster(first, "machine", "token", "--roles", "agent"))
        muster(other, "join", str(token), "--name", "b", "--detach")
        driver.wait_until(lambda: agents() == {"local", "b"})
        muster(other, "leave")
        assert home.DomainFolder(other / "fleet").holder() is None
        assert not home.Home(other).settings_file.exists()
        driver.wait_until(lambda: agents() == {"local"})
        listed = json.loads(muster(first, "machine", "list", "-o", "json"))
        assert [row["name"] for row in listed] == ["local"]
    finally:
        for place in (other, first):
            driver.run("down", home=place)
