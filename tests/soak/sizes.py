"""Samples of every process and stream: memory, descriptors, threads, tasks, bytes."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import time
from collections.abc import Iterator

import psutil

from muster.bus.client import client as bus_client
from muster.bus.http import client as http_client
from muster.core import errors
from tests.soak import domain as domain_
from tests.soak import faults, trends

PERIOD_S = 10.0
_TASKS = re.compile(r"^muster_asyncio_tasks ([\d.e+]+)$", re.MULTILINE)

Series = dict[tuple[str, str], list[trends.SizeSample]]


class Sampler:
    def __init__(
        self,
        domain: domain_.SoakDomain,
        injector: faults.FaultInjector,
        operator: bus_client.NatsBus,
        began_s: float,
    ) -> None:
        self._domain = domain
        self._injector = injector
        self._operator = operator
        self._began_s = began_s
        self._processes: dict[int, psutil.Process] = {}
        self._cpu_s: dict[int, float] = {}
        self.series: Series = {}
        self.cpu_s = 0.0  # of all processes, while they were sampled
        self.failures = 0

    async def run(self) -> None:
        while True:
            started_s = time.monotonic()
            try:
                await self.sample()
            except errors.MusterError:  # the faults go on meanwhile
                self.failures += 1
            await asyncio.sleep(max(0.0, started_s + PERIOD_S - time.monotonic()))  # pace of samples

    async def sample(self) -> None:
        at_s = time.monotonic() - self._began_s
        for name, process in (await self._all()).items():
            with contextlib.suppress(psutil.Error):
                with process.oneshot():
                    self._add(at_s, name, "memory", process.pid, process.memory_info().rss)
                    self._add(at_s, name, "descriptors", process.pid, process.num_fds())
                    self._add(at_s, name, "threads", process.pid, process.num_threads())
                    times = process.cpu_times()
                used_s = times.user + times.system
                self.cpu_s += used_s - self._cpu_s.get(process.pid, used_s)
                self._cpu_s[process.pid] = used_s
        for page in (await self._domain.status())["pages"]:
            with contextlib.suppress(errors.MusterError):
                answer = await http_client.get(f"{page['url']}/metrics", timeout_s=2.0)
                match = _TASKS.search(answer.body.decode())
                if match is not None:
                    self._add(
                        at_s, faults.process_name(page["process"]), "tasks", page["pid"], float(match[1])
                    )
        await self._sample_streams(at_s)
        folder = self._domain.settings().domain.folder
        for name, path in (
            ("view of inform-2", self._domain.home / "inform-2.db"),
            ("logs", folder / "logs"),
        ):
            self._add(at_s, name, "bytes", 0, await asyncio.to_thread(_bytes, path))

    async def _sample_streams(self, at_s: float) -> None:
        offset = 0
        while True:
            page = await self._operator.storage.call("STREAM.LIST", {"offset": offset})
            for stream in page["streams"] or ():
                self._add(at_s, f"stream {stream['config']['name']}", "bytes", 0, stream["state"]["bytes"])
            offset += len(page["streams"] or ())
            if not page["streams"] or offset >= page["total"]:
                return

    async def _all(self) -> dict[str, psutil.Process]:
        pids = await self._injector.processes()
        pids["farm (load)"] = self._domain.farm_pid
        processes = {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = self._processes.setdefault(pid, psutil.Process(pid))
                processes[name] = process
                for child in process.children(recursive=True) if name == "pipeline" else ():
                    kind = "JVM" if child.name() == "java" else "Python worker"
                    processes.setdefault(f"pipeline ({kind})", self._processes.setdefault(child.pid, child))
        processes["soak (load)"] = self._processes.setdefault(0, psutil.Process())
        return processes

    def _add(self, at_s: float, subject: str, size: str, life: int, value: float) -> None:
        self.series.setdefault((subject, size), []).append(trends.SizeSample(at_s, life, value))


def _bytes(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _files(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file())
    elif path.exists():
        yield path
