"""Metrics of the resources of an agent, on the page of its process: whether they are up, and what they use.

Processes are found by the mark of their run, all in one look at ``/proc`` in a thread, every few seconds and
not at each exposition: a scraper cannot make an agent slow. What a process used that has ended counts in its
parent's time; a total never decreases while a run lasts. Of more resources than `SERIES_MAX`, the first by
name are shown; ``muster_resources`` counts all.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping

from muster.core import health
from muster.core.telemetry import metrics
from muster.manage.agent import resource_host
from muster.supervision import os_process

SAMPLE_S = 10.0
SERIES_MAX = metrics.MAX_SERIES
LABELS = ("resource", "type")

Values = dict[tuple[str, ...], float]


class ResourceMetrics:
    def __init__(self, measure: metrics.Metrics, hosted: Mapping[str, resource_host.HostedResource]) -> None:
        self._hosted = hosted
        self._used: dict[str, os_process.RunUsage] = {}
        self._runs: dict[str, str | int] = {}
        measure.gauge("resources", "Resources of the agent.").read_from(lambda: len(self._existing()))
        measure.gauge_from(
            "resource_up", "1 if the resource is up, otherwise 0.", LABELS, self._of_each(_is_up)
        )
        measure.gauge_from(
            "resource_state",
            "1 for the present state of the resource.",
            (*LABELS, "state"),
            lambda: {
                (*self._labels(name), self._hosted[name].observed.state.value): 1.0 for name in self._shown()
            },
        )
        measure.gauge_from(
            "resource_generation",
            "Generation of the desired state for which the resource runs.",
            LABELS,
            self._of_each(lambda hosted: hosted.observed.ran),
        )
        measure.counter_from(
            "resource_starts",
            "Starts of the resource since its agent was started.",
            LABELS,
            self._of_each(lambda hosted: hosted.adapter.starts if hosted.adapter else None),
        )
        measure.counter_from(
            "resource_cpu_seconds",
            "Processor time of all processes of the present run.",
            LABELS,
            self._of_used(lambda used: used.cpu_s),
        )
        measure.gauge_from(
            "resource_memory_bytes",
            "Resident memory of all processes of the present run; what they share counts for each.",
            LABELS,
            self._of_used(lambda used: used.memory_bytes),
        )
        measure.gauge_from(
            "resource_processes",
            "Processes of the present run.",
            LABELS,
            self._of_used(lambda used: used.processes),
        )

    async def sample_forever(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def sample(self) -> None:
        runs = {name: run for name in self._existing() if (run := _run_of(self._hosted[name]))}
        used = await asyncio.to_thread(os_process.usage, runs) if runs else {}
        for name in used.keys() & self._used.keys():
            if runs[name] == self._runs[name]:
                used[name] = used[name].since(self._used[name])
        self._runs, self._used = runs, used

    def _existing(self) -> list[str]:
        return [name for name, hosted in self._hosted.items() if hosted.record.config is not None]

    def _shown(self) -> list[str]:
        return heapq.nsmallest(SERIES_MAX, self._existing())

    def _labels(self, name: str) -> tuple[str, str]:
        return name, self._hosted[name].record.type

    def _of_each(self, value: Callable[[resource_host.HostedResource], float | None]) -> Callable[[], Values]:
        def values() -> Values:
            read = {name: value(self._hosted[name]) for name in self._shown()}
            return {self._labels(name): number for name, number in read.items() if number is not None}

        return values

    def _of_used(self, value: Callable[[os_process.RunUsage], float]) -> Callable[[], Values]:
        def values() -> Values:
            shown = filter(self._used.__contains__, self._shown())
            return {self._labels(name): value(self._used[name]) for name in shown}

        return values


def _is_up(hosted: resource_host.HostedResource) -> float:
    return float(hosted.observed.exists and hosted.observed.state is health.HealthState.UP)


def _run_of(hosted: resource_host.HostedResource) -> str | int | None:
    """The mark of its run, or the process itself."""
    if hosted.adapter is not None and hosted.adapter.mark:
        return hosted.adapter.mark
    pid = hosted.observed.properties.get("pid")
    return pid if isinstance(pid, int) and pid > 0 else None
