"""A rolling upgrade: two versions in one domain, in both directions, then the way back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests import next_version
from tests.cli import driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = driver.SOURCE.parent
MANIFEST = """
resources:
  - {{name: {0}-here, type: memory, agent: local, config: {{value: 1}}}}
  - {{name: {0}-there, type: memory, agent: {1}, config: {{value: 1}}}}
"""


@dataclass(frozen=True)
class Version:
    """A tree of one version, and commands of it."""

    number: str
    source: Path

    def environment(self, home: Path) -> dict[str, str]:
        return driver.environment(home, PYTHONPATH=f"{self.source}:{ROOT}")

    async def run(self, home: Path, *arguments: str, code: int = 0) -> Any:
        done = await asyncio.to_thread(
            subprocess.run,
            driver.command_line(*arguments),
            env=self.environment(home),
            cwd=home.parent,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == code, f"{self.number}: muster {' '.join(arguments)}: {done}"
        return driver.Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Version, Version]:
    source = tmp_path_factory.mktemp("next") / "src"
    next_version.copy(source)
    return Version(muster.__version__, driver.SOURCE), Version(next_version.NUMBER, source)


@contextlib.asynccontextmanager
async def beside(version: Version, home: Path, suffix: str) -> AsyncIterator[None]:
    """A manager, an agent and an information node of this version."""
    worker = ("-m", "tests.app.run_worker", str(home))
    node = f"inform-{suffix}"
    async with contextlib.AsyncExitStack() as stack:
        for arguments, line in (
            ((*worker, "manager", f"manager-{suffix}"), f"is ready: Muster {version.number}"),
            ((*worker, "agent", f"agent-{suffix}"), f"is ready: Muster {version.number}"),
            (("-m", "muster", "run", "inform", "--name", node), "is up"),
        ):
            process = await child_process.start(sys.executable, *arguments, env=version.environment(home))
            await stack.enter_async_context(process)
            await process.line(line, timeout_s=90)
        yield


async def use(version: Version, other: Version, home: Path, suffix: str) -> None:
    """Clients of both versions use the services of both."""
    number = version.number.replace(".", "")
    manifest = home.parent / f"{number}.yaml"
    manifest.write_text(MANIFEST.format(f"{suffix}-{number}", f"agent-{suffix}"))
    await version.run(home, "apply", "-f", str(manifest))
    names = (f"{suffix}-{number}-here", f"{suffix}-{number}-there")

    async def up(client: Version) -> bool:
        rows = (await client.run(home, "get", *names, "-o", "json")).json()
        return [row["state"] for row in rows] == ["up", "up"]

    for client in (version, other):
        await eventually(functools.partial(up, client), timeout_s=120)
    for name in names:
        await other.run(home, "exec", name, "restart")
    queue, key = f"queue:{number}", f"versions/{number}"
    await version.run(home, "message", "send", queue, f"from {number}")
    received = await other.run(home, "message", "receive", queue, "--timeout", "30s")
    assert f"from {number}" in received.out
    await version.run(home, "inform", "put", key, number)
    for node in (f"inform-{suffix}", "inform-default-1"):
        read = await other.run(home, "inform", "get", key, "--raw", "--max-staleness", "0s", "--node", node)
        assert read.out.strip() == number


async def test_two_versions_work_together_and_the_way_back_is_open(
    versions: tuple[Version, Version], tmp_path: Path
):
    present, following = versions
    home = tmp_path / "home"
    await present.run(home, "init", "--port", "0", "--set", "web.enabled=false")
    # Agents, managers and clients of the next version first.
    await present.run(home, "up", "--detach", "--timeout", "140s")
    try:
        async with beside(following, home, "next"):
            managers = (await following.run(home, "get", "--managers", "-o", "json")).json()
            assert "manager-next" in [row["name"] for row in managers]
            await use(following, present, home, "next")
            await use(present, following, home, "next")
    finally:
        await present.run(home, "down")
    # Then brokers and registries.
    await following.run(home, "up", "--detach", "--timeout", "140s")
    try:
        value = await present.run(home, "inform", "get", "versions/020", "--raw", "--max-staleness", "0s")
        assert value.out.strip() == "020"
        async with beside(present, home, "past"):
            await use(following, present, home, "past")
            await use(present, following, home, "past")
    finally:
        await following.run(home, "down")
    await present.run(home, "up", "--detach", "--timeout", "140s")
    try:
        names = ("past-020-here", "past-010-here")
        rows = (await present.run(home, "get", *names, "-o", "json")).json()
        assert [row["name"] for row in rows] == list(names)
    finally:
        await present.run(home, "down")
