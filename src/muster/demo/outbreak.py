"""The outbreak: a worm spreads among web servers, and a domain detects, contains and removes it.

The complete loop of Muster in one scenario.  Simulated farms of servers send reports.  Spark aggregates them
by region and version and raises an alert if too many servers are infected.  The controller of the region,
with attributes that a trust manager granted, commands exactly the infected servers to be isolated and those
at risk to be patched.  The policies of the servers accept such commands from no other sender, and their
managers execute them.  Meanwhile a manager and a broker are killed, and an impostor sends a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from muster.app import certificates, domain, identities
from muster.app.components import bootstrap_client
from muster.bus import api
from muster.core import errors, messages, topics
from muster.demo import controllers, scenario, web_farm, worm
from muster.manage import client as manage_client
from muster.manage import protocol
from muster.notify import client as notify
from muster.pipeline import client as pipeline
from muster.pipeline.fleet import state
from muster.trust import documents, grants, nkeys
from muster.trust.permissions import roles

HOUR_S = 3600.0
ROUND_S = 1.0
REPORT_S, WAITING_S = 3.0, 8.0  # between two lines about the fleet: during the attack, and before
ENTRIES_MAX = 1_000
STEM = "farm"
RANK = {"_trust_level": 3}
TRUST_MANAGER = "trust-manager"
STOP_S = 5.0
NEARLY_ALL = 0.95  # of the fleet: a few reports of a window may be late

DROPS = (state.FUTURE, state.LATE, state.UNUSABLE)


@dataclass
class OutbreakSummary:
    servers: int
    detect_s: float = 0.0  # from the worm's release to the first alert
    notify_s: float = 0.0  # from that alert to the first server that received a command
    contain_s: float = 0.0  # from the release until no infected server can attack
    heal_s: float = 0.0  # until the fleet is patched, and its reports show it
    fallen: int = 0  # servers that were ever infected
    unhindered: int = 0  # servers that would have been infected within an hour without a reaction
    commands: int = 0
    deliveries: int = 0
    operations: int = 0
    not_done: int = 0
    repeated: int = 0
    forged_reached: int = 0
    killed: list[str] = field(default_factory=list)
    failovers: int = 0  # servers that another manager took over
    reports: int = 0  # that Spark processed
    dropped: int = 0  # messages dropped by slow subscribers, and reports rejected by Spark
    curve: list[tuple[float, int]] = field(default_factory=list)  # seconds, infected

    @property
    def saved(self) -> int:
        return self.unhindered - self.fallen


class Outbreak:
    """``async with Outbreak(running, options, report) as outbreak: await outbreak.run()``"""

    def __init__(
        self, running: domain.Domain, options: scenario.ScenarioOptions, report: controllers.Report
    ) -> None:
        self._running = running
        self._options = options
        self._report = report
        self._stack = contextlib.AsyncExitStack()
        self._farms: list[asyncio.subprocess.Process] = []
        self._tallies: dict[str, web_farm.FarmStatistics] = {}
        self._tallied = asyncio.Event()
        self._shown: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._first_managers: dict[str, int] = {}
        self._controllers = controllers.RegionalControllers(report, self._after_s)
        self._released_at = 0.0
        self._reported_at = time.monotonic()
        self._mentioned = ("", 0)
        self.summary = OutbreakSummary(options.plan.servers)

    async def __aenter__(self) -> Outbreak:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(_end(process) for process in self._farms))
        await self._stack.aclose()

    async def run(self) -> OutbreakSummary:
        began = time.monotonic()
        plan = self._options.plan
        self._admin = await self._connect("admin", roles.Role.OPERATOR)
        self._watcher = await self._connect("outbreak", roles.Role.USER)
        tallies = topics.TopicPattern.parse(f"{web_farm.TALLIES}/*").subjects[0]
        await self._watcher.subscribe(tallies, handler=self._on_tally)
        await self._qualify()
        await asyncio.gather(self._start_farms(), self._apply())
        await self._until(self._is_up, "servers are up")
        self._first_managers = self._managers()
        of_each = ", ".join(f"{name}: {count:,}" for name, count in sorted(self._first_managers.items()))
        self._report(
            "fleet",
            f"{plan.servers:,} servers up after {time.monotonic() - began:.0f} s ({of_each})",
            {"servers": plan.servers, "managers": self._first_managers},
        )
        await self._wait_for_reports()
        await self._release()
        await self._fight()
        await self._heal()
        await self._until(self._is_settled, "commands were answered")
        self._conclude()
        await self._count_drops()
        return self.summary

    # Preparation

    async def _qualify(self) -> None:
        """Let a trust manager grant attributes to the controllers; otherwise no server accepts commands."""
        async with notify.NotifyClient(self._admin) as receivers:
            for model in scenario.MODELS:
                await receivers.define(model)
        root = await asyncio.to_thread(self._running.trust.root_authority)
        key, now = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT), time.time()
        regions = self._options.plan.regions
        mandate = root.appoint(
            key.public,
            TRUST_MANAGER,
            tier=2,
            may_grant={
                "_command_region": documents.ValueIn(values=regions),
                "_trust_level": documents.ValueRange(low=1, high=3),
            },
            now=now,
            lifetime_s=HOUR_S,
        )
        manager = grants.Authority(key, mandate)
        for region in regions:
            name = f"{region}-control"
            bus = await self._connect(name, roles.Role.RESPONDER)
            receivers = await self._stack.enter_async_context(notify.NotifyClient(bus))
            await receivers.present(
                manager.grant(name, {"_command_region": region, **RANK}, tier=1, now=now, lifetime_s=HOUR_S)
            )
            self._tasks.append(
                asyncio.create_task(self._controllers.run(region, bus, receivers.sender(name)), name=name)
            )
        self._report("trust", f"the trust manager ranks {len(regions)} regional controllers", {})

    async def _start_farms(self) -> None:
        options, plan = self._options, self._options.plan
        shares = web_farm.split_farm(STEM, plan.servers, options.farms)
        uses_tls = self._running.brokers is not None and self._running.settings.bus.uses_tls
        for name, _, _ in shares:
            task = web_farm.FarmConfig(
                name=name,
                servers=self._running.servers,
                creds={
                    "agent": await self._credentials(name, roles.Role.AGENT),
                    "channel": await self._credentials(f"{name}-channel", roles.Role.CHANNEL),
                    "worm": await self._credentials(f"{name}-worm", roles.Role.USER),
                },
                ca=str(certificates.bundle(self._running.settings)) if uses_tls else None,
                plan=plan,
                farms=shares,
                period_s=options.period_s,
                channel=self._running.settings.channel.name,  # type: ignore[attr-defined]
                policies={region: scenario.policy(region) for region in plan.regions},
            )
            with (self._running.folder.logs / f"{name}.log").open("ab") as log:
                started = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    web_farm.__name__,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            self._farms.append(started)
            assert started.stdin is not None
            started.stdin.write(msgspec.json.encode(task) + b"\n")
        for started in self._farms:
            assert started.stdout is not None
            try:
                ready = await asyncio.wait_for(started.stdout.readline(), options.start_s_max)
            except TimeoutError:
                raise errors.TimedOut(f"a farm is not up after {options.start_s_max:g} s") from None
            if not ready:
                raise errors.Unavailable(f"a farm ended at its start: see {self._running.folder.logs}")

    async def _credentials(self, name: str, role: roles.Role) -> str:
        return str(await asyncio.to_thread(identities.credentials_file, self._running.trust, name, role))

    async def _apply(self) -> None:
        plan = self._options.plan
        for farm, first, count in web_farm.split_farm(STEM, plan.servers, self._options.farms):
            names = [plan.name(number) for number in range(first, first + count)]
            for start in range(0, count, ENTRIES_MAX):
                entries = [
                    {"name": name, "type": "memory", "agent": farm, "group": "web"}
                    for name in names[start : start + ENTRIES_MAX]
                ]
                await manage_client.call(
                    self._admin,
                    protocol.request(self._admin.identity, "apply"),
                    {"entries": entries},
                    timeout_s=self._options.start_s_max,
                )
                self._mention("applied", first + start + len(entries))

    async def _wait_for_reports(self) -> None:
        client = pipeline.PipelineClient(self._admin)
        machines, most_s = 0, self._options.start_s_max
        try:
            async with asyncio.timeout(most_s):
                while machines < NEARLY_ALL * self._options.plan.servers:
                    await asyncio.sleep(ROUND_S)
                    with contextlib.suppress(errors.Unavailable, errors.NotFound):  # Spark is still starting
                        system = await client.system()
                        machines = 0 if system is None else system.machines
                        self._mention("reported to Spark", machines)
        except TimeoutError:
            raise errors.TimedOut(
                f"after {most_s:g} s Spark has reports of only {machines:,} servers",
                hint=f"this machine may be too busy; see {self._running.folder.logs}",
            ) from None
        self._report("spark", f"Spark has reports of {machines:,} of them", {"machines": machines})

    # The attack

    async def _release(self) -> None:
        self._released_at = time.time()
        await self._watcher.publish(topics.Topic.parse(web_farm.RELEASE).subject, b"")
        plan = self._options.plan
        self._report(
            "worm",
            f"released on {plan.first_infected} servers; it takes versions {' and '.join(plan.holes)}",
            {},
        )
        mallory = await self._connect("mallory", roles.Role.USER)
        async with notify.NotifyClient(mallory) as receivers:
            self._forged = await receivers.sender("mallory").send(
                "command", {"operation": "isolate"}, durable=True
            )

    async def _fight(self) -> None:
        """Wait until no infected server can attack another."""
        killed = not self._options.kill
        async for infected in self._curve(self._options.contain_s_max):
            if not killed and self._deliveries():
                killed = True
                await self._kill()
            if not infected and self._controllers.alerted.done():
                self.summary.contain_s = after_s = self._after_s()
                self._report(
                    "contained", f"no server spreads it any more, {after_s:.0f} s after its release", {}
                )
                return

    async def _heal(self) -> None:
        client = pipeline.PipelineClient(self._admin)
        async for infected in self._curve(self._options.contain_s_max):
            commanded = sum(tally.commanded for tally in self._tallies.values())
            if infected or self._counts()["isolated"] or self._controllers.needed or commanded:
                continue
            with contextlib.suppress(errors.Unavailable):
                system = await client.system()
                seen = None if system is None else system.metrics.get("infected")
                enough = NEARLY_ALL * self._options.plan.servers
                if seen is not None and not seen.sum and seen.count >= enough:
                    break
        self.summary.heal_s = self._after_s()
        self._report(
            "healthy",
            f"nothing is infected or at risk, and the reports say so, after {self.summary.heal_s:.0f} s",
            {},
        )

    async def _kill(self) -> None:
        """Kill a manager and a broker while the first command is being executed."""
        victim = max(self._first_managers)
        await bootstrap_client.BootstrapClient(self._admin).kill(victim)
        self.summary.killed.append(victim)
        assert self._running.brokers is not None
        broker = (await self._running.brokers.describe())[-1]
        assert broker.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(broker.pid, signal.SIGKILL)
        self.summary.killed.append(f"broker {broker.name}")
        self._report(
            "killed", f"{' and '.join(self.summary.killed)} (kill -9)", {"killed": self.summary.killed}
        )

    # Observations

    def _on_tally(self, message: api.Message) -> None:
        with contextlib.suppress(errors.InvalidInput):
            tally = messages.decode(message.data, web_farm.FarmStatistics)
            self._tallies[tally.farm] = tally
            self._tallied.set()

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(self._options.start_s_max):
                while not condition():
                    self._tallied.clear()
                    await self._tallied.wait()
        except TimeoutError:
            raise errors.TimedOut(
                f"after {self._options.start_s_max:g} s not all {what}",
                hint=f"see {self._running.folder.logs}",
            ) from None

    async def _curve(self, most_s: float) -> AsyncIterator[int]:
        """Yield the number of infected servers at each report of a farm."""
        deadline = time.monotonic() + most_s
        while True:
            self._tallied.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._tallied.wait()
            except TimeoutError:
                raise errors.TimedOut(
                    f"the worm is not contained after {most_s:g} s: {self._line()}",
                    hint=f"this machine may be too busy; see {self._running.folder.logs}",
                ) from None
            for task in self._tasks:
                if task.done():
                    task.result()  # raises the error of a failed controller
            counts = self._counts()
            self.summary.curve.append((self._after_s(), counts["infected"]))
            if counts != self._shown and self._is_due(REPORT_S):
                self._shown = counts
                line = f"{self._after_s():4.0f} s: {self._line()}"
                self._report("fleet", line, {"after_s": self._after_s(), **counts})
            yield counts["infected"]

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for tally in self._tallies.values():
            for name, count in tally.counts.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def _managers(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for tally in self._tallies.values():
            for name, count in tally.managers.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def _is_up(self) -> bool:
        up = sum(tally.up for tally in self._tallies.values())
        self._mention("up", up)
        return up == self._options.plan.servers

    def _mention(self, what: str, count: int) -> None:
        """Report progress from time to time, if there is any."""
        servers = self._options.plan.servers
        if count < servers and (what, count) != self._mentioned and self._is_due(WAITING_S):
            self._mentioned = what, count
            self._report(
                "fleet", f"{count:,} of {servers:,} servers {what}", {"servers": count, "of": servers}
            )

    def _is_due(self, after_s: float) -> bool:
        due = time.monotonic() - self._reported_at >= after_s
        if due:
            self._reported_at = time.monotonic()
        return due

    def _is_settled(self) -> bool:
        """Whether every accepted command has been executed or has failed. Those of a killed manager take
        longest, because its servers have to be reassigned.
        """
        answered = sum(sum(tally.done.values()) + tally.not_done for tally in self._tallies.values())
        return answered >= self._deliveries()

    def _deliveries(self) -> int:
        return sum(sum(tally.accepted.values()) for tally in self._tallies.values())

    def _after_s(self) -> float:
        return time.time() - self._released_at

    def _line(self) -> str:
        counts = self._counts()
        return (
            f"{counts['infected']:,} infected, {counts['isolated']:,} isolated, "
            f"{counts['patched']:,} patched, {counts['at_risk']:,} at risk"
        )

    def _conclude(self) -> None:
        summary, tallies = self.summary, self._tallies.values()
        alerted = self._controllers.alerted.result()
        received_at = [tally.first_accepted_at for tally in tallies if tally.first_accepted_at]
        summary.detect_s = alerted - self._released_at
        summary.notify_s = min(received_at) - alerted
        summary.fallen = sum(tally.counts["fallen"] for tally in tallies)
        summary.unhindered = worm.spread_unchecked(self._options.plan, HOUR_S)[-1]
        summary.commands = self._controllers.commands
        summary.deliveries = self._deliveries()
        summary.operations = sum(sum(tally.done.values()) for tally in tallies)
        summary.not_done = sum(tally.not_done for tally in tallies)
        summary.repeated = sum(tally.repeated for tally in tallies)
        summary.forged_reached = sum(tally.accepted.get(self._forged, 0) for tally in tallies)
        lost = [name for name in summary.killed if name in self._first_managers]
        summary.failovers = sum(self._first_managers[name] for name in lost)

    async def _count_drops(self) -> None:
        """Add the drops that the farms, the connections of this process and Spark counted."""
        dropped = [bus.statistics().dropped for bus in (self._admin, self._watcher)]
        dropped += [tally.dropped for tally in self._tallies.values()]
        with contextlib.suppress(errors.Unavailable):
            progress = await pipeline.PipelineClient(self._admin).progress()
            self.summary.reports = progress.total_rows
            dropped += [progress.counts.get(reason, 0) for reason in DROPS]
        self.summary.dropped = sum(dropped)

    async def _connect(self, identity: str, role: roles.Role) -> api.Bus:
        return await self._stack.enter_async_context(await self._running.connect(identity, role))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
