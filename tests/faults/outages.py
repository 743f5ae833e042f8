"""How long clients wait when one process of a domain is killed (SIGKILL) or frozen (SIGSTOP).

    python -m tests.faults.outages [--fault kill|freeze] [--target broker|registry|manager] [--json FILE]

It starts a domain with three brokers as a user would (``muster init``, ``muster up --detach``), runs the
workloads below from clients on every broker, applies one fault to one process, and prints the longest time
between two successes of each workload around the fault. `make outages` prints the tables of
docs/reliability.md.

A workload repeats one operation as fast as it is acknowledged, at most ten times a second. Failed attempts
count as waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import muster
from muster.app import home
from muster.app import settings as app_settings
from muster.bus import api as bus_api
from muster.bus.client import client as bus_client
from muster.bus.http import client as http_client
from muster.core import errors
from muster.core.settings import loader
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.message import destinations
from muster.message.client import api as message_api
from muster.notify import client as notify_client
from muster.notify import models
from muster.predicates import types
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.cli import driver

PACE_S = 0.1
SETTLE_S = 3.0  # of undisturbed work before and after the fault
RECOVERY_S_MAX = 120.0
FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
TARGETS = ("broker", "registry", "manager")


@dataclass
class Workload:
    """The successes of one operation, by client."""

    name: str
    times: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # the last one of each client

    def succeeded(self, client: str) -> None:
        self.times.setdefault(client, []).append(time.monotonic())

    def longest_wait_s(self, since: float, until: float) -> float:
        waits = [0.0]
        for times in self.times.values():
            marks = [since, *(at for at in times if since <= at <= until), until]
            waits += [after - before for before, after in itertools.pairwise(marks)]
        return max(waits)

    def works(self, since: float) -> bool:
        """Whether every client has succeeded several times since then."""
        return all(sum(at > since for at in times) >= 5 for times in self.times.values())


class Drill:
    """A domain, its workloads, and the process that fails."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        self.workloads: dict[str, Workload] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = contextlib.AsyncExitStack()

    # The domain.

    async def command(self, *arguments: str) -> Any:
        answer = await asyncio.to_thread(driver.run, *arguments, home=self.home)
        if answer.code:
            raise RuntimeError(f"muster {' '.join(arguments)}: {answer.out}{answer.err}")
        return answer

    async def status(self) -> dict[str, Any]:
        settings = loader.load(app_settings.Settings, file=self.home / "muster.toml")
        running = await asyncio.to_thread(home.DomainFolder(settings.domain.folder).running)
        assert running is not None
        page: dict[str, Any] = (await http_client.get(f"{running.health_url}/status", timeout_s=10.0)).json()
        return page

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.command("init", "--brokers", "3", "--port", "0")
        await self.command("up", "--detach", "--set", "web.enabled=false", "--timeout", "120s")
        try:
            async with self._stack:
                await self._start_workloads()
                yield
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self.command("down", "--force")

    # Clients and workloads.

    async def _connect(self, identity: str, role: roles.Role, first: str) -> bus_client.NatsBus:
        """A client whose first broker is ``first``."""
        settings = loader.load(app_settings.Settings, file=self.home / "muster.toml")
        trust = keyring.Keyring.open(settings.keys_folder)
        if identity not in [record.identity for record in trust.records()]:
            await asyncio.to_thread(trust.issue, identity, role)
        servers = [first, *(url for url in self.servers if url != first)]
        bus = await bus_client.connect(servers, creds=trust.credentials(identity), in_order=True)
        self._stack.push_async_callback(bus.close)
        return bus

    async def _start_workloads(self) -> None:
        status = await self.status()
        self.servers = [broker["url"] for broker in status["brokers"]]
        self.brokers = {broker["name"]: broker["pid"] for broker in status["brokers"]}
        for number, url in enumerate(self.servers, 1):
            user = await self._connect(f"user-{number}", roles.Role.USER, url)
            operator = await self._connect(f"operator-{number}", roles.Role.OPERATOR, url)
            publisher = await self._connect(
                f"publisher-{number}", roles.Role.USER, self.servers[number % len(self.servers)]
            )
            await self._subscriber(f"{number}", user, publisher)
            await self._persistent_sender(f"{number}", user)
            await self._events(f"{number}", user)
            await self._contexts(f"{number}", user)
            await self._requests(f"{number}", operator)
            self.operator = operator

    def _repeat(self, name: str, client: str, attempt: Callable[[], Awaitable[object]]) -> None:
        workload = self.workloads.setdefault(name, Workload(name))
        workload.times[client] = []

        async def run() -> None:
            while True:
                try:
                    await attempt()
                except errors.MusterError as error:
                    if workload.failures.get(client) != str(error):
                        _report(f"{name} {client}: {error}")
                    workload.failures[client] = str(error)
                    await asyncio.sleep(PACE_S)  # pace
                    continue
                workload.succeeded(client)
                await asyncio.sleep(PACE_S)  # pace

        task = asyncio.create_task(run(), name=f"{name} {client}")
        task.add_done_callback(_report_end)
        self._tasks.append(task)

    async def _subscriber(self, number: str, bus: bus_api.Bus, publisher: bus_api.Bus) -> None:
        workload = self.workloads.setdefault("plain subscriber", Workload("plain subscriber"))
        workload.times[number] = []
        await bus.subscribe(f"topic.drill.{number}", handler=lambda _: workload.succeeded(number))
        publish = functools.partial(publisher.publish, f"topic.drill.{number}", b"x")
        self._repeat("plain publisher", number, publish)

    async def _persistent_sender(self, number: str, bus: bus_api.Bus) -> None:
        connection = await self._stack.enter_async_context(message_api.Connection(bus))
        session = await self._stack.enter_async_context(connection.session())
        producer = session.producer(destinations.queue(f"drill-{number}"))
        self._repeat("persistent send", number, lambda: producer.send("x"))

    async def _events(self, number: str, bus: bus_api.Bus) -> None:
        notify = await self._stack.enter_async_context(notify_client.NotifyClient(bus))
        if number == "1":
            await notify.define(models.Model("machine", {"number": types.AttributeType(types.ValueKind.INT)}))
            await notify.define(models.Model("tick", {}, kind=models.ModelKind.EVENT))
        receiver = await notify.advertise(
            f"receiver-{number}", "machine", {"number": int(number)}, policy="TRUE"
        )
        sender = notify.sender(f"sender-{number}")

        async def send_and_receive() -> None:
            await sender.send("tick", to=f"number = {number}", timeout_s=5.0)
            await receiver.next(timeout_s=2.0)

        self._repeat("event", number, send_and_receive)

    async def _contexts(self, number: str, bus: bus_api.Bus) -> None:
        contexts = inform_client.InformClient(bus)
        await contexts.put(f"drill/{number}", b"0")
        self._repeat("context put", number, lambda: contexts.put(f"drill/{number}", b"x"))
        self._repeat("context get", number, lambda: contexts.get(f"drill/{number}"))

    async def _requests(self, number: str, bus: bus_api.Bus) -> None:
        manage = manage_client.ManageClient(bus)
        self._repeat("registry read", number, lambda: manage.names(where="TRUE"))

    # Faults.

    async def processes(self) -> dict[str, int]:
        return {row["name"]: row["pid"] for row in (await self.status())["management"]}

    async def victim(self, target: str) -> tuple[str, int]:
        if target == "broker":
            info = await self.operator.storage.call("STREAM.INFO.messages")
            name = info["cluster"]["leader"]
            return name, self.brokers[name]
        if target == "registry":
            entry = await self.operator.storage.call(
                "STREAM.MSG.GET.KV_leases", {"last_by_subj": "$KV.leases.manage.registry"}
            )
            name = json.loads(base64.b64decode(entry["message"]["data"]))["holder"]
            return name, (await self.processes())[name]
        name = "manager-1"
        return name, (await self.processes())[name]

    async def measure(self, fault: str, target: str) -> dict[str, Any]:
        await asyncio.sleep(SETTLE_S)  # pace of the drill
        name, pid = await self.victim(target)
        since = time.monotonic()
        os.kill(pid, FAULTS[fault])
        _report(f"{fault} {target} {name} (pid {pid})")
        deadline = since + RECOVERY_S_MAX
        started_s = None
        seen_states: list[str] = []
        last = since
        while time.monotonic() < deadline:
            await asyncio.sleep(1.0)  # pace of looking
            status = await self.status()
            rows = status.get("brokers", []) if target == "broker" else status.get("management", [])
            row: dict[str, Any] = next((row for row in rows if row["name"] == name), {})
            if not seen_states or seen_states[-1] != row.get("state"):
                seen_states.append(str(row.get("state")))
            if started_s is None and row.get("pid") not in (None, pid):
                started_s = time.monotonic() - since
                last = time.monotonic()
            works = all(workload.works(last) for workload in self.workloads.values())
            if started_s is not None and works and time.monotonic() - last > SETTLE_S:
                break
            if fault == "freeze" and started_s is None and works and time.monotonic() - since > 90:
                break
        until = time.monotonic()
        if target == "broker":
            self.brokers = {broker["name"]: broker["pid"] for broker in (await self.status())["brokers"]}
        if started_s is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return {
            "fault": fault,
            "target": target,
            "replaced_s": None if started_s is None else round(started_s, 1),
            "states": seen_states,
            "longest_wait_s": {
                workload.name: round(workload.longest_wait_s(since - 1, until), 1)
                for workload in self.workloads.values()
                if workload.name != "plain publisher"
            },
        }


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _report(f"{task.get_name()} ended: {error!r}")


async def main(targets: list[str], faults: list[str]) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="muster-outages-") as folder:
        drill = Drill(Path(folder) / "home")
        async with drill.running():
            for target in targets:
                for fault in faults:
                    results.append(await drill.measure(fault, target))
                    _report(json.dumps(results[-1]))
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results as a table: workloads in rows, killed and frozen side by side."""
    lines = []
    for target in dict.fromkeys(result["target"] for result in results):
        by_fault = {result["fault"]: result for result in results if result["target"] == target}
        lines += [f"| one {target} | {' | '.join(by_fault)} |", f"|---|{'---|' * len(by_fault)}"]
        for name in next(iter(by_fault.values()))["longest_wait_s"]:
            waits = (f"{result['longest_wait_s'][name]:.1f} s" for result in by_fault.values())
            lines.append(f"| {name} | {' | '.join(waits)} |")
        replaced = (f"{result['replaced_s']} s" for result in by_fault.values())
        lines += [f"| replaced after | {' | '.join(replaced)} |", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--fault", choices=list(FAULTS), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = asyncio.run(main(options.target or list(TARGETS), options.fault or list(FAULTS)))
    if options.json:
        options.json.write_text(json.dumps({"version": muster.__version__, "results": measured}, indent=2))
    sys.stdout.write(table(measured))
