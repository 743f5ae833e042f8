"""Metrics of this machine and of configured processes, from psutil.

A process is identified by a part of its command line.  A configured process that is not found is reported as
a service that is down; its manager has the authoritative state.

Blocking; the sensor calls it in a thread.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from muster.core import errors, health, messages

try:
    import psutil
except ImportError as error:  # pragma: no cover
    raise errors.MissingDependency(
        "the sensor needs psutil", hint="pip install 'muster-fabric[monitor]'"
    ) from error


class HostMetrics:
    """Rates are computed between two samples; the first sample has none."""

    def __init__(self, processes: Mapping[str, str] | None = None) -> None:
        self._patterns = dict(processes or {})
        self._before: dict[str, tuple[float, float]] = {}
        self._cpu_times = psutil.cpu_times()

    def sample(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for read in (self._cpu, self._memory, self._storage, self._network, self._system):
            # A container or an unusual system may lack some figures.
            with contextlib.suppress(OSError, RuntimeError, AttributeError):
                metrics.update(read())
        return metrics

    def services(self) -> list[messages.ServiceReport]:
        matching = _matching(self._patterns)
        return [_service(name, pattern, matching[name]) for name, pattern in self._patterns.items()]

    def _cpu(self) -> dict[str, float]:
        """psutil.cpu_percent() compares with the last call of its thread; samples come from any thread."""
        before, now = self._cpu_times, psutil.cpu_times()
        spent = {name: max(0.0, getattr(now, name) - getattr(before, name)) for name in now._fields}
        # Linux counts the time of guests as user time too.
        total = sum(spent.values()) - spent.get("guest", 0.0) - spent.get("guest_nice", 0.0)
        if not total:  # the counters have not advanced since the last sample
            return {}
        self._cpu_times = now
        idle = spent["idle"] + spent.get("iowait", 0.0)
        return {"cpu_percent": round(100 * (total - idle) / total, 1)}

    def _memory(self) -> dict[str, float]:
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return {
            "memory_percent": memory.percent,
            "memory_used_bytes": float(memory.total - memory.available),
            "swap_percent": swap.percent,
        }

    def _storage(self) -> dict[str, float]:
        metrics = {"disk_percent": psutil.disk_usage("/").percent}
        counters = psutil.disk_io_counters()
        if counters is not None:
            metrics |= self._rate("disk_read_bytes_s", counters.read_bytes)
            metrics |= self._rate("disk_write_bytes_s", counters.write_bytes)
        return metrics

    def _network(self) -> dict[str, float]:
        counters = psutil.net_io_counters()
        return {
            **self._rate("network_in_bytes_s", counters.bytes_recv),
            **self._rate("network_out_bytes_s", counters.bytes_sent),
        }

    def _system(self) -> dict[str, float]:
        return {
            "load_1m": psutil.getloadavg()[0],
            "processes": float(len(psutil.pids())),
            "uptime_s": time.time() - psutil.boot_time(),
        }

    def _rate(self, name: str, total: float) -> dict[str, float]:
        now_s = time.monotonic()
        before, self._before[name] = self._before.get(name), (total, now_s)
        if before is None or now_s <= before[1] or total < before[0]:
            return {}
        return {name: (total - before[0]) / (now_s - before[1])}


def _matching(patterns: Mapping[str, str]) -> dict[str, list[psutil.Process]]:
    """The processes with each pattern in their command line: always all, because a service may start more.

    The option of a sensor that watches them, and of the shell that started it, contains the pattern as well.
    """
    matching: dict[str, list[psutil.Process]] = {name: [] for name in patterns}
    options = {name: _unquoted(f"{name}={pattern}") for name, pattern in patterns.items()}
    for process in psutil.process_iter(["cmdline"]) if patterns else ():
        words: Any = process.info.get("cmdline")
        with contextlib.suppress(psutil.Error):
            command = " ".join(words or [process.name()])
            for name, pattern in patterns.items():
                if pattern in command and options[name] not in _unquoted(command) and _is_alive(process):
                    matching[name].append(process)
    return matching


def _service(name: str, pattern: str, processes: Sequence[psutil.Process]) -> messages.ServiceReport:
    totals: dict[str, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for figure, value in _figures(process).items():
                so_far = totals.get(figure, 0.0)
                totals[figure] = max(so_far, value) if figure == "uptime_s" else so_far + value
    if not totals:
        reason = f"no process has {pattern[:100]!r} in its command line"
        return messages.ServiceReport(name=name, state=health.HealthState.DOWN, reason=reason)
    return messages.ServiceReport(name=name, metrics=totals)


def _unquoted(text: str) -> str:
    return re.sub(r"[\'\"\\]", "", text)


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process exists and has not ended: a zombie only waits for its parent."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _figures(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        return {
            "cpu_percent": process.cpu_percent(),
            "memory_bytes": float(process.memory_info().rss),
            "threads": float(process.num_threads()),
            "processes": 1.0,
            "uptime_s": time.time() - process.create_time(),
        }
