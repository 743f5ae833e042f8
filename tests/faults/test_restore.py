"""The restore drill: back up under load, lose the machine, restore on another home and other ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster.app import settings as app_settings
from muster.bus.client import client as bus_client
from muster.core import errors
from muster.core.settings import loader
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.message import destinations
from muster.message.client import api as message_api
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.faults import outages
from tests.pipeline import test_history

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MANIFEST = """
resources:
  - name: worker
    type: process
    agent: local
    config: {command: [sh, -c, "echo $$ > PID_FILE; exec sleep 3600"]}
"""
RULES = "rules: [{name: silent, scope: node, when: age_s > 20}]"
SETTINGS = {
    "web.enabled": "false",
    "sensor.period_s": "1",
    "sensor.http_port": "0",
    "sensor.statsd_port": "0",
    "channel.hold_s": "1",
    "pipeline.trigger_s": "1",
    "pipeline.window_s": "2",
    "pipeline.delay_s": "2",
    "pipeline.operators": "*",
}


class RestoredDomain(outages.Drill):
    """A domain with one broker, a sensor and the pipeline."""

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        await self.command("up", "--detach", "--with", "monitoring,pipeline", "--timeout", "140s")
        try:
            status = await self.status()
            self.servers = [broker["url"] for broker in status["brokers"]]
            async with self._stack:
                yield
        except BaseException:
            for path in sorted((self.home / "local" / "logs").glob("*")):
                sys.stderr.write(f"{path}:\n{path.read_text()[-6000:]}\n")
            raise
        finally:
            await self.command("down", "--force")
            await eventually(lambda: not self.processes_of_home(), timeout_s=60)

    def processes_of_home(self) -> list[psutil.Process]:
        """The processes with this home in their arguments: the driver of Spark ends a little later."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(str(self.home) in argument for argument in process.info["cmdline"] or ())
        ]

    async def connect(self, identity: str, role: roles.Role = roles.Role.USER) -> bus_client.NatsBus:
        return await self._connect(identity, role, self.servers[0])

    @property
    def history(self) -> Path:
        settings = loader.load(app_settings.Settings, file=self.home / "muster.toml")
        return Path(settings.pipeline.history_root(settings.domain.folder))

    def reports(self) -> list[tuple[Any, ...]]:
        try:
            rows = test_history.read(self.history)
        except errors.NotFound:
            return []
        return [(row["machine"], row["boot"], row["sequence"]) for row in rows]


class Ledger:
    """What the domain has acknowledged."""

    def __init__(self) -> None:
        self.sent = 0
        self.versions: dict[str, int] = {}

    async def send(self, bus: bus_client.NatsBus) -> None:
        async with message_api.Connection(bus) as connection, connection.session() as session:
            producer = session.producer(destinations.queue("drill"))
            while True:
                await producer.send(str(self.sent + 1))
                self.sent += 1

    async def put(self, bus: bus_client.NatsBus) -> None:
        contexts, number = inform_client.InformClient(bus), 0
        while True:
            number += 1
            key = f"drill/{number % 20}"
            await contexts.put(key, str(number).encode())
            self.versions[key] = number


async def is_up(manage: manage_client.ManageClient) -> bool:
    return [row.state for row in await manage.get("worker")] == ["up"]


async def test_nothing_acknowledged_before_the_backup_is_missing_and_everything_is_managed(tmp_path: Path):
    lost, other, file = (
        RestoredDomain(tmp_path / "lost"),
        RestoredDomain(tmp_path / "other"),
        tmp_path / "lab.tar.gz",
    )
    rules, pid_file = tmp_path / "rules.yaml", tmp_path / "worker.pid"
    rules.write_text(RULES)
    options = [f"{key}={value}" for key, value in (SETTINGS | {"pipeline.rules": str(rules)}).items()]
    await lost.command("init", "--port", "0", *(part for option in options for part in ("--set", option)))
    ledger = Ledger()
    async with lost.up():
        operator = await lost.connect("operator", roles.Role.OPERATOR)
        manage = manage_client.ManageClient(operator)
        await manage.apply(MANIFEST.replace("PID_FILE", str(pid_file)), wait_s=60)
        load = [
            asyncio.create_task(ledger.send(await lost.connect("sender"))),
            asyncio.create_task(ledger.put(await lost.connect("writer"))),
        ]
        await eventually(
            lambda: ledger.sent > 100 and len(ledger.versions) == 20 and lost.reports(), timeout_s=200
        )
        sent, versions, reports = ledger.sent, dict(ledger.versions), lost.reports()
        await lost.command("backup", str(file))
        assert ledger.sent > sent, "there was load during the backup"
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    with contextlib.suppress(ProcessLookupError):  # the machine is lost with all of its processes
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    pid_file.unlink()
    shutil.rmtree(lost.home)

    await other.command("restore", str(file))
    async with other.up():
        manage = manage_client.ManageClient(await other.connect("operator", roles.Role.OPERATOR))
        await eventually(lambda: is_up(manage), timeout_s=60)
        assert pid_file.exists(), "it was started on the other machine"
        bus = await other.connect("reader")
        contexts = inform_client.InformClient(bus)
        for key, version in versions.items():
            assert int((await contexts.get(key)).value) >= version
        await contexts.put("drill/0", b"after")
        assert (await contexts.get("drill/0", max_staleness_s=0)).value == b"after"
        received = await consume(bus)
        assert received == list(range(1, len(received) + 1)), "in order, each one once"
        assert len(received) >= sent
        assert set(other.reports()) >= set(reports)
        before = len(other.reports())
        await eventually(lambda: len(other.reports()) > before + 5, timeout_s=200)
        rows = other.reports()
        assert len(rows) == len(set(rows))
        alerts = (await other.command("alert", "list", "-o", "json")).json()
        assert [row for row in alerts if row["rule"] == "silent"] == []
        await manage.delete("worker")
        await manage.wait_gone("worker", timeout_s=60)  # else it runs on after the domain


async def consume(bus: bus_client.NatsBus) -> list[int]:
    numbers = []
    async with message_api.Connection(bus) as connection, connection.session() as session:
        consumer = await session.consumer(destinations.queue("drill"))
        while (body := await consumer.receive_body(str, timeout_s=5.0)) is not None:
            numbers.append(int(body))
    return numbers
