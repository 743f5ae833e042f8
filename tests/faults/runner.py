"""A run: workloads, one fault, recovery, and the end; its history is stored and then checked."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from tests.faults import checker, deployment, history, nemesis, network
from tests.faults.workloads import workload

SETTLE_S_MAX = 60.0
RECOVERY_S_MAX = 90.0
SUCCESSES = 3
PACE_S = 0.2
DISK_BYTES = "384m"


@contextlib.asynccontextmanager
async def running(kind: str, seed: int) -> AsyncIterator[deployment.Deployment]:
    """A domain, on a small disk of its own where the machine allows."""
    with tempfile.TemporaryDirectory(prefix="muster-faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name, "disk")
        await asyncio.to_thread(folder.mkdir)
        if network.missing() is None:
            network.run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
        domain = deployment.KINDS[kind](folder, seed)
        try:
            await domain.start()
            yield domain
        finally:
            await domain.stop()
            if network.missing() is None:
                network.run("umount", "-l", str(folder))


def keep_logs(domain: deployment.Deployment, logs: Path) -> None:
    """Copy what its processes have logged."""
    logs.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.log", "*/*/logs/*", "**/brokers/*/*.log"):
        for file in domain.folder.glob(pattern):
            name = "-".join((domain.kind, *file.relative_to(domain.folder).parts))
            shutil.copyfile(file, logs / name)


class Run:
    def __init__(
        self, domain: deployment.Deployment, file: Path, fault: str, workloads: Iterable[str], seed: int
    ) -> None:
        self.file = file
        self._domain = domain
        self._fault = nemesis.FAULTS[fault](domain, random.Random(f"{seed}/{fault}"))
        names = list(workloads)
        self._history = history.StoredHistory(
            file,
            fault=fault,
            workloads=names,
            seed=seed,
            deployment=domain.kind,
            date=datetime.date.today().isoformat(),
            load=round(os.getloadavg()[0], 1),
        )
        tag = f"{file.stem}-{os.getpid()}"
        self._workloads: dict[str, workload.Workload] = {
            name: checker.WORKLOADS[name](domain, self._history, tag) for name in names
        }

    async def execute(self, seconds: float) -> None:
        try:
            for each in self._workloads.values():
                await each.start()
            if missing := await self._wait_for_work(0.0, SETTLE_S_MAX):
                raise RuntimeError(f"the load did not begin: {missing}")
            operation = self._history.begin("nemesis", "fault", fault=self._history.run["fault"])
            victim = await self._fault.begin()
            self._history.event("nemesis", "victim", text=victim, agent=self._fault.agent)
            await asyncio.sleep(max(seconds, self._fault.least_s))  # pace
            for text in await self._fault.observe():
                self._history.event("nemesis", "untrue", text=text)
            await self._fault.end()
            self._history.end(operation, "ok")
            for name, late in (await self._wait_for_work(operation.end_s, RECOVERY_S_MAX)).items():
                self._history.event(name, "not-restored", text=", ".join(late))
            self._history.event("nemesis", "load-ended")
            await asyncio.gather(*(each.stop() for each in self._workloads.values()))
            await asyncio.gather(*(self._finish(each) for each in self._workloads.values()))
        finally:
            for each in self._workloads.values():
                await each.close()
            self._history.close()

    async def _finish(self, each: workload.Workload) -> None:
        try:
            await each.finish()
        except Exception as error:  # noqa: BLE001  (a violation)
            self._history.event(each.name, "failure", error=f"{type(error).__name__}: {error}")

    async def _wait_for_work(self, since_s: float, timeout_s: float) -> dict[str, list[str]]:
        """Until each client has succeeded in each of its actions a few times. Returns what has not."""
        late: dict[str, list[str]] = {}

        def works() -> bool:
            late.clear()
            late.update(
                {
                    name: missing
                    for name, each in self._workloads.items()
                    if (missing := self._late(each, since_s))
                }
            )
            return not late

        await workload.wait_for(works, timeout_s)
        return late

    def _late(self, each: workload.Workload, since_s: float) -> list[str]:
        counts: dict[tuple[str, str], int] = {(each.name, action): 0 for action in each.measured}
        for operation in self._history.of(*each.measured):
            if operation.actor == workload.UNMEASURED:
                continue
            counts.pop((each.name, operation.action), None)
            done = operation.outcome == "ok" and since_s <= operation.end_s
            place = operation.actor, operation.action
            counts[place] = counts.get(place, 0) + done
        return [f"{actor} {action}" for (actor, action), count in counts.items() if count < SUCCESSES]
