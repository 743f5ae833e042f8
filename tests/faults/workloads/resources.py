"""Resources: an operator changes several at once, others read them, and processes that end are restored.

The desired state is that of resources in memory.  A real process on every machine shows that resources are
managed: it is killed again and again, and its next instance reports whether the former one still runs.  So
does one that moves when its machine is lost: also if the former one is on another machine, because all of
them share a kernel here.  One that is stopped, as its whole machine is, does not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from muster.core import errors
from muster.manage import client as manage_client
from tests.faults import deployment
from tests.faults.workloads import workload

RESTORED_S_MAX = 60.0
RESTART_PACE_S = 1.0
AFTER_S = 8.0  # without contact, until a machine is lost
SCRIPT = """
read p < {log}.pid
case $(cut -d ' ' -f 3 /proc/${{p:-none}}/stat 2>/dev/null) in ''|T|Z) s=alone;; *) s=overlap;; esac
echo $$ > {log}.pid
echo $$ $s >> {log}
exec sleep 3600
"""


class ResourceWorkload(workload.Workload):
    name = "resources"
    guarantee = "one owner acts; a change is stored as a whole; what ends is restored"
    measured = ("apply", "describe", "restore")

    async def start(self) -> None:
        self._logs: dict[str, Path] = {}
        self._last = 0
        operators = [
            manage_client.ManageClient(await self.connect("operator", number), timeout_s=workload.TIMEOUT_S)
            for number in range(1, deployment.CLIENTS + 1)
        ]
        self._reader = operators[0]
        agents = await self._agents_up(operators[0])
        self._names = [f"{self.tag}-{number}" for number in range(3)]
        self._agents = dict(zip(self._names, agents * 3, strict=False))
        await self._apply(operators[0], workload.UNMEASURED, self._names)
        processes: list[dict[str, object]] = []
        for agent in agents:
            log = self.deployment.scratch / f"{self.tag}-{agent}.log"
            name = f"{self.tag}-process-{agent}"
            self._logs[name] = log
            processes.append(
                {
                    "name": name,
                    "type": "process",
                    "agent": agent,
                    "config": {"command": ["sh", "-c", SCRIPT.format(log=log)]},
                    "restart": {"attempts": 1000, "delay_s": 0.1, "delay_s_max": 1.0},
                }
            )
        moving = {key: value for key, value in processes[0].items() if key != "agent"}
        name, log = f"{self.tag}-moving", self.deployment.scratch / f"{self.tag}-moving.log"
        self._logs[name] = log
        moving |= {
            "name": name,
            "placement": {},
            "reschedule": {"after_s": AFTER_S, "attempts": 1000},
            "config": {"command": ["sh", "-c", SCRIPT.format(log=log)]},
        }
        for entry in (*processes, moving):
            await workload.patiently(_create, operators[0], entry)
        self.run(self._operate(operators[0]))
        for number, reader in enumerate(operators[1:], 1):
            self.run(self._read_all(reader, f"auditor-{number}"))
        for log_name in self._logs:
            # How long it takes until a machine counts as lost is a setting, and not measured.
            actor = workload.UNMEASURED if log_name == name else log_name
            self.run(self._disturb(log_name, actor))

    async def _agents_up(self, manage: manage_client.ManageClient) -> list[str]:
        """The agents of all machines, as soon as all have reported."""
        agents: list[str] = []
        for _ in range(int(RESTORED_S_MAX)):
            agents = [row.name for row in await workload.patiently(manage.agents)]
            if len(agents) >= self.deployment.machines:
                return agents
            await asyncio.sleep(1.0)  # pace of looking
        raise errors.Unavailable(f"only the agents {agents} have reported")

    async def _apply(self, manage: manage_client.ManageClient, actor: str, names: list[str]) -> None:
        self._last += 1
        operation = self.history.begin(actor, "apply", keys=names, value=self._last)
        entries = [
            f"  - {{name: {name}, type: memory, agent: {agent}, config: {{value: {self._last}}}}}"
            for name, agent in self._agents.items()
            if name in names
        ]
        await self.operate(operation, manage.apply("resources:\n" + "\n".join(entries)))

    async def _operate(self, manage: manage_client.ManageClient) -> None:
        async def change() -> None:
            await self._apply(manage, "operator", sorted(self.chance.sample(self._names, 2)))

        await self.repeat(change, 2 * workload.PACE_S)

    async def _read_all(self, manage: manage_client.ManageClient, actor: str) -> None:
        async def read() -> None:
            for name in self.chance.sample(self._names, 2):
                await self._describe(manage, actor, name)

        await self.repeat(read)

    async def _describe(self, manage: manage_client.ManageClient, actor: str, name: str) -> None:
        operation = self.history.begin(actor, "describe", key=name)
        await self.operate(
            operation, manage.describe(name), lambda described: int(described.spec.config["value"])
        )

    async def _disturb(self, name: str, actor: str) -> None:
        """Kill the process, and wait until it is restored."""

        async def restore() -> None:
            before = len(self._instances(name))
            operation = self.history.begin(actor, "restore", key=name)
            if before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._instances(name)[-1], signal.SIGKILL)
            deadline_s = asyncio.get_running_loop().time() + RESTORED_S_MAX
            while len(self._instances(name)) == before:
                await asyncio.sleep(workload.PACE_S)  # pace
                if asyncio.get_running_loop().time() > deadline_s:
                    self.history.end(operation, "timed-out")
                    return
            self.history.end(operation, "ok")

        await self.repeat(restore, RESTART_PACE_S)

    def _instances(self, name: str) -> list[int]:
        log = self._logs[name]
        return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []

    async def finish(self) -> None:
        for name in self._names:
            await self._describe(self._reader, workload.UNMEASURED, name)
        for name, log in self._logs.items():
            for line in log.read_text().splitlines() if log.exists() else ():
                self.history.fact("instance", key=name, pid=int(line.split()[0]), state=line.split()[1])
        await workload.patiently(self._reader.delete, *self._names, *self._logs)
        await workload.patiently(self._reader.wait_gone, *self._names, *self._logs, timeout_s=60.0)


async def _create(manage: manage_client.ManageClient, entry: dict[str, object]) -> None:
    with contextlib.suppress(errors.AlreadyExists):
        await manage.create(entry)
