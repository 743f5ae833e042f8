"""Types the commands of docs/guides/three-machines.md on hosts of their own, and checks what they promise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from muster.testing.eventually import eventually
from tests.cli import driver
from tests.faults import network, table

GUIDE = table.ROOT / "docs/guides/three-machines.md"
COMMAND = re.compile(r"^([abc])\$ (muster .*)$", re.MULTILINE)
HOSTS = ("a", "b", "c")


class TypedGuide:
    def __init__(self, folder: Path) -> None:
        self.folder = folder  # where tokens are copied to

    def type(self, host: str, line: str) -> str:
        line = line.replace("10.0.0.", network.address(0).removesuffix("0"))
        words = f"{sys.executable} -m muster {line.removeprefix('muster ')}"
        done = subprocess.run(
            [*network.inside(host), "/bin/sh", "-c", words],
            cwd=self.folder,
            env={**driver.environment(self.folder / host), "MUSTER_HOME": str(self.folder / host)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{host}$ {line}: {done.stdout}{done.stderr}")
        return done.stdout

    def lose(self, host: str) -> None:
        """All processes of the host, and its disk."""
        listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        (self.folder / host).rename(self.folder / f"lost-{host}-{time.time_ns()}")

    def storing(self) -> list[str]:
        rows = json.loads(self.type("a", "muster machine list -o json"))
        return sorted(row["name"] for row in rows if row["stores"])

    def agents(self, host: str) -> set[str]:
        rows = json.loads(self.type(host, "muster get --agents -o json"))
        return {row["name"] for row in rows if row["state"] == "up"}


async def follow(folder: Path) -> None:
    network.add_hub()
    for number, name in enumerate(HOSTS, 1):
        network.add_host(name, number)
    guide = TypedGuide(folder)
    text = GUIDE.read_text()
    before, lost = text.split("## A lost machine")
    lost, most = lost.split("## Most machines lost")
    for host, line in COMMAND.findall(before):
        await asyncio.to_thread(guide.type, host, line)
    await eventually(lambda: guide.storing() == ["b", "c", "local"], timeout_s=60)
    await eventually(lambda: guide.agents("b") == {"local", "b", "c"}, timeout_s=60)
    guide.type("b", 'muster message send queue:orders "four chairs"')
    guide.lose("c")
    for host, line in COMMAND.findall(lost):
        await asyncio.to_thread(guide.type, host, line)
    await eventually(lambda: guide.storing() == ["b", "c", "local"], timeout_s=60)
    await eventually(lambda: guide.agents("b") == {"local", "b", "c"}, timeout_s=60)
    guide.lose("b")
    guide.lose("c")
    for host, line in COMMAND.findall(most):
        await asyncio.to_thread(guide.type, host, line)
    assert guide.storing() == ["local"]
    assert "four chairs" in guide.type("a", "muster message receive queue:orders")
    await asyncio.to_thread(guide.type, "a", "muster down --force")


if __name__ == "__main__":
    network.enter()
    asyncio.run(follow(Path(sys.argv[1])))
