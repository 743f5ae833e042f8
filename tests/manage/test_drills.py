"""kill -9 of each kind of process, of two at once, and of the whole domain, while clients send requests.

Confirmed requests are not lost; what should run runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster import connection
from muster.app.components import bootstrap_client
from muster.core import errors
from muster.manage import client
from muster.testing.eventually import eventually
from tests.cli import driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.may_block(reason="domains are started as a shell does"),
]

BACK_S = 15.0  # the promise, on a machine that does nothing else
PATIENCE_S = 120.0
PROCESSES, MEMORIES = 4, 20


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class DrillDomain:
    """A domain in a process of its own, as `muster up` runs it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        home.mkdir()
        (home / "muster.toml").write_text(
            f'[domain]\nname = "drill"\ndata_dir = "."\n[bus]\nport = {self.port}\n'
            '[manage]\nbeat_s = "500ms"\n'
        )
        self.pid = 0

    async def up(self) -> float:
        began = time.monotonic()
        answer = await asyncio.to_thread(driver.run, "-o", "json", "up", "--detach", home=self.home)
        assert answer.code == 0, answer.err
        self.pid = answer.json()["pid"]
        return began

    async def down(self) -> None:
        await asyncio.to_thread(driver.run, "down", home=self.home)

    async def connect(self) -> Any:
        creds = next(self.home.glob("**/admin.creds"))
        return await connection.connect(f"nats://127.0.0.1:{self.port}", creds=creds)

    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.pid)
        return [root, *(child for child in root.children(recursive=True) if "sleep" not in child.name())]

    def nursery(self) -> int:
        """The process that bears management's processes: alone, without those."""
        mine = psutil.Process(self.pid).children()
        return int(
            next(child.pid for child in mine if "muster.app.supervisor.fork_server" in child.cmdline())
        )

    def broker(self) -> int:
        return int(next(process.pid for process in self.family() if "nats-server" in process.name()))


async def value_of(fleet: client.ManageClient, name: str) -> int | None:
    """The desired state; None if none was requested."""
    value: int | None = (await fleet.describe(name)).spec.config.get("value")
    return value


class Users:
    """Change desired states and run operations continuously; record what was acknowledged."""

    def __init__(self, fleet: client.ManageClient) -> None:
        self.fleet = fleet
        self.expected: dict[str, int | None] = {}
        self.done = 0
        self.refused = 0
        self.going_home = False

    async def work(self) -> None:
        number = 0
        while not self.going_home:
            number += 1
            name = f"m{number % MEMORIES}"
            try:
                await self.fleet.put(name, config={"value": number})
                self.expected[name] = number
                await self.fleet.exec("echo", name, arguments={"text": str(number)}, timeout_s=5)
                self.done += 1
            except errors.MusterError:
                # It may have been done: what it is now is what should be.
                self.refused += 1
                self.expected.pop(name, None)
                with contextlib.suppress(errors.MusterError):
                    self.expected[name] = await value_of(self.fleet, name)


@pytest.fixture
async def domain(tmp_path):
    made = DrillDomain(tmp_path / "home")
    await made.up()
    yield made
    await made.down()


async def all_up(fleet: client.ManageClient) -> bool:
    try:
        rows = await fleet.get()
    except errors.MusterError:
        return False
    return len(rows) == PROCESSES + MEMORIES and all(row.state == "up" for row in rows)


async def all_answer(fleet: client.ManageClient) -> bool:
    """The registry may be out of date: here each resource is observed by its adapter."""
    try:
        actual = await fleet.exec("get", *await fleet.names(), timeout_s=5)
    except errors.MusterError:
        return False
    running = [outcome.result["state"] == "up" for outcome in actual if outcome.outcome == "done"]
    return running == [True] * (PROCESSES + MEMORIES)


async def kill(admin: Any, names: Iterable[str]) -> None:
    await asyncio.gather(*(bootstrap_client.BootstrapClient(admin).kill(name) for name in names))


async def test_every_killed_process_is_restarted(domain, record_property):
    async with await domain.connect() as admin:
        fleet = client.ManageClient(admin, timeout_s=PATIENCE_S)
        lines = [
            f'  - {{name: p{n}, type: process, agent: local, config: {{command: [sleep, "{1000 + n}"]}}}}'
            for n in range(PROCESSES)
        ]
        lines += [f"  - {{name: m{n}, type: memory, agent: local}}" for n in range(MEMORIES)]
        await fleet.apply("resources:\n" + "\n".join(lines))
        await eventually(lambda: all_up(fleet), timeout_s=PATIENCE_S)
        pids = {f"p{n}": (await fleet.observe(f"p{n}")).properties["pid"] for n in range(4)}
        users = Users(client.ManageClient(admin, timeout_s=5.0))
        working = asyncio.create_task(users.work())
        took: dict[str, float] = {}

        async def drill(name: str, act: Any) -> None:
            """After it everything is up, and users' work goes on."""
            began = time.monotonic()
            await act()
            before = users.done
            await eventually(lambda: users.done > before + 2 or working.done(), timeout_s=PATIENCE_S)
            assert not working.done(), working
            await eventually(lambda: all_up(fleet), timeout_s=PATIENCE_S)
            took[name] = time.monotonic() - began

        acting = next(
            entry.name
            for entry in await bootstrap_client.BootstrapClient(admin).processes()
            if entry.name.startswith("registry")
        )
        for victims in (
            ("manager-1",),
            (acting,),
            ("agent-local",),
            ("manager-2", acting),
            ("agent-local", "manager-1"),
        ):
            await drill(" and ".join(victims), functools.partial(kill, admin, victims))

        async def kill_broker() -> None:
            os.kill(domain.broker(), signal.SIGKILL)

        await drill("broker", kill_broker)

        async def kill_nursery() -> None:
            os.kill(domain.nursery(), signal.SIGKILL)
            await kill(admin, ("manager-1",))

        await drill("nursery and manager-1", kill_nursery)
        for name, pid in pids.items():
            assert psutil.pid_exists(pid), f"{name} was never touched"
        users.going_home = True
        await working  # what is under way is answered first
        expected = {name: await value_of(fleet, name) for name in users.expected}
        assert expected == users.expected, "acknowledged values are the desired values"

    # The bootstrap node alone: what it started ends with it, and what is managed runs on.
    family = domain.family()
    os.kill(domain.pid, signal.SIGKILL)
    await asyncio.to_thread(psutil.wait_procs, family, timeout=PATIENCE_S)
    assert not [entry for entry in family if entry.is_running()], "nothing is left behind"
    began = await domain.up()
    async with await domain.connect() as admin:
        fleet = client.ManageClient(admin, timeout_s=PATIENCE_S)
        await eventually(lambda: all_answer(fleet), timeout_s=PATIENCE_S)
        took["bootstrap"] = time.monotonic() - began

    # All of it at once.
    for process in domain.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    began = await domain.up()
    async with await domain.connect() as admin:
        fleet = client.ManageClient(admin, timeout_s=PATIENCE_S)
        await eventually(lambda: all_answer(fleet), timeout_s=PATIENCE_S)
        took["everything"] = time.monotonic() - began
        for name, value in expected.items():
            assert await value_of(fleet, name) == value
        for name, pid in pids.items():
            actual = (await fleet.observe(name)).properties["pid"]
            assert actual == pid, f"{name} ran on, and was found again"
        await fleet.delete(*await fleet.names())
        await eventually(lambda: _none(fleet), timeout_s=PATIENCE_S)
    record_property("took_s", took)
    idle = os.getloadavg()[0] < (os.cpu_count() or 1) * 1.5  # others' work says nothing about ours
    if idle:
        assert took["everything"] < BACK_S, took
        assert took["bootstrap"] < BACK_S, took


async def _none(fleet: client.ManageClient) -> bool:
    return not await fleet.names()
