"""The domain under load: three brokers, Spark, and processes of their own for what is killed.

The domain runs as a user would start it. A notifier, an information node, a channel and the AMQP gateway run
beside it, supervised as systemd would: a process that ended is started again, and one that does not reply is
killed. A farm of the demo hosts the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pathlib
import socket
import sys
from collections.abc import AsyncIterator, Sequence

import msgspec

from muster.app import settings as app_settings
from muster.bus import api as bus_api
from muster.bus.client import client as bus_client
from muster.bus.http import health as http_health
from muster.core import messages, topics
from muster.demo import scenario, web_farm, worm
from muster.manage import client as manage_client
from muster.manage import protocol as manage_protocol
from muster.notify import client as notify_client
from muster.supervision import children
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.cli import driver
from tests.faults import outages

FARM, CHANNEL = "farm", "channel-1"
GATEWAY_USER, GATEWAY_PASSWORD = "amqp-client", "the password of a drill"
PERIOD_S = 10.0
UP_S_MAX = 240.0
PROBE = children.ProbePolicy(failures_max=2, grace_s=60.0)

SETTINGS = {
    "web.port": "0",
    "notify.enabled": "false",  # two processes beside the domain
    "message.partitions": "2",
    "message.processes": "2",
    "manage.agent": "false",
    "sensor.enabled": "true",
    "sensor.period_s": "5",
    "sensor.channels": CHANNEL,
    "channel.enabled": "false",
    # Short retention, so that streams are full, and level, within the run.
    "retention.reports.max_age_s": "5m",
    "retention.system.max_age_s": "5m",
    "retention.decisions.max_age_s": "5m",
    "retention.notifications.max_age_s": "5m",
}
SPARK = {
    "pipeline.enabled": "true",
    "pipeline.trigger_s": "10s",
    "pipeline.window_s": "10s",
    "pipeline.delay_s": "10s",
    "pipeline.memory": "768m",
}


class SoakDomain(outages.Drill):
    def __init__(self, folder: pathlib.Path, *, fleet: int, spark: bool) -> None:
        super().__init__(folder)
        self.fleet = fleet
        self.spark = spark
        self.plan = worm.WormPlan(servers=fleet)
        self.beside: dict[str, children.ChildSupervisor] = {}
        self.statistics: web_farm.FarmStatistics | None = None  # of the farm
        self.farm_pid = 0
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.gateway_port: int = listener.getsockname()[1]

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        settings = SETTINGS | (SPARK if self.spark else {})
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        await self.command("init", "--brokers", "3", "--port", "0", *flags)
        await self._command_input(
            "gateway", "password", GATEWAY_USER, text=f"{GATEWAY_PASSWORD}\n{GATEWAY_PASSWORD}\n"
        )
        await self.command("up", "--detach", "--timeout", "140s")
        try:
            status = await self.status()
            self.servers = [broker["url"] for broker in status["brokers"]]
            async with self._stack:
                await self._start_beside()
                await self._start_farm()
                yield
        finally:
            for child in self.beside.values():
                await child.stop()
            await self.command("down", "--force")

    def settings(self) -> app_settings.Settings:
        """Read once: the supervision of processes beside the domain asks for them all the time."""
        return self._loaded

    @functools.cached_property
    def _loaded(self) -> app_settings.Settings:
        return super().settings()

    @property
    def logs(self) -> pathlib.Path:
        return self.settings().domain.folder / "logs"

    async def connect(self, identity: str, role: roles.Role = roles.Role.USER) -> bus_client.NatsBus:
        return await self._connect(identity, role, self.servers[len(identity) % len(self.servers)])

    async def _command_input(self, *arguments: str, text: str) -> None:
        answer = await asyncio.to_thread(driver.run, *arguments, home=self.home, stdin=text)
        assert not answer.code, answer.err

    # Processes beside the domain

    async def _start_beside(self) -> None:
        here = ["--home", str(self.home)]
        commands: dict[str, Sequence[str]] = {
            "notifier-1": ["-m", "tests.soak.notifier_process", str(self.home), "notifier-1"],
            "notifier-2": ["-m", "tests.soak.notifier_process", str(self.home), "notifier-2"],
            "inform-2": ["-m", "muster", "run", "inform", "--name", "inform-2", *here],
            CHANNEL: ["-m", "muster", "run", "channel", "--name", CHANNEL, *here],
            "gateway": [
                *("-m", "muster", "run", "amqp", "--set", "amqp.processes=1", *here),
                *("--set", f"amqp.port={self.gateway_port}"),
            ],
        }
        for name, command in commands.items():
            child = self.beside[name] = self._supervised(name, command)
            child.start_soon()
        for child in self.beside.values():
            await eventually(functools.partial(self._replies, child), timeout_s=UP_S_MAX)

    def _supervised(self, name: str, command: Sequence[str]) -> children.ChildSupervisor:
        async def launch() -> children.ProcessHandle:
            with (self.logs / f"{name}.log").open("ab") as log:
                return await asyncio.create_subprocess_exec(
                    sys.executable,
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=driver.environment(self.home, PYTHONPATH=f"{driver.SOURCE}:{driver.SOURCE.parent}"),
                )

        async def responds() -> bool:
            return await self._replies(child)

        child = children.ChildSupervisor(name, launch, probe=responds, probe_policy=PROBE)
        return child

    async def _replies(self, child: children.ChildSupervisor) -> bool:
        pages = self.settings().domain.folder / "run" / "pages"
        return await http_health.reported(pages, child.pid) is not None

    # The fleet

    async def _start_farm(self) -> None:
        operator = await self.connect("admin-of-farm", roles.Role.OPERATOR)
        async with notify_client.NotifyClient(operator) as notify:
            for model in scenario.MODELS:
                await notify.define(model)
        watcher = await self.connect("farm-watcher")
        tallies = topics.Topic.parse(f"{web_farm.TALLIES}/{FARM}").subject
        await watcher.subscribe(tallies, handler=self._on_statistics)
        trust = self.keyring()
        creds = {}
        for kind, role in (
            ("agent", roles.Role.AGENT),
            ("channel", roles.Role.CHANNEL),
            ("worm", roles.Role.USER),
        ):
            identity = FARM if kind == "agent" else f"{FARM}-{kind}"
            trust.issue(identity, role)
            creds[kind] = str(trust.credentials_path(identity))
        task = web_farm.FarmConfig(
            name=FARM,
            servers=tuple(self.servers),
            creds=creds,
            plan=self.plan,
            farms=((FARM, 0, self.fleet),),
            period_s=PERIOD_S,
            channel=CHANNEL,
            policies=dict.fromkeys(self.plan.regions, "TRUE"),
        )
        with (self.logs / "farm.log").open("ab") as log:
            farm = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                web_farm.__name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert farm.stdin is not None
        assert farm.stdout is not None
        self._stack.push_async_callback(farm.wait)
        self._stack.callback(farm.stdin.close)
        self.farm_pid = farm.pid
        farm.stdin.write(msgspec.json.encode(task) + b"\n")
        async with asyncio.timeout(UP_S_MAX):
            assert await farm.stdout.readline(), "the farm ended"
            entries = [
                {"name": self.plan.name(number), "type": "memory", "agent": FARM, "group": "web"}
                for number in range(self.fleet)
            ]
            await manage_client.call(
                operator,
                manage_protocol.request(operator.identity, "apply"),
                {"entries": entries},
                timeout_s=UP_S_MAX,
            )
        await eventually(
            lambda: self.statistics is not None and self.statistics.up >= self.fleet, timeout_s=UP_S_MAX
        )

    def _on_statistics(self, message: bus_api.Message) -> None:
        self.statistics = messages.decode(message.data, web_farm.FarmStatistics)
