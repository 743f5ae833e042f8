"""Prometheus beside the pipeline: it scrapes the same samples as text, a page for each thousand machines.

Only its own CPU counts, not that of the pages; of ours, all but the generator's.  On both sides the first
periods are not counted: Spark compiles then, and Prometheus creates its series.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time

import psutil

from benchmarks import harness, measure, pipeline_domain

PERIOD_S = pipeline_domain.PERIOD_S
MILLION = 1_000_000


def rows(
    played: pipeline_domain.Played, warm: int, periods: int, place: pathlib.Path, *, has_goal: bool
) -> list[harness.Row]:
    usage = _prometheus(played.profile, played.machines, warm * PERIOD_S, periods * PERIOD_S, place)
    a_period = played.samples * PERIOD_S / played.seconds / MILLION
    peer_name = "Prometheus" if usage else None
    goal = 1.0 if usage and has_goal else None
    return [
        harness.Row(
            metric=f"{played.name}: CPU for a million samples",
            ours=played.product_cpu_s / (played.samples / MILLION),
            unit="s",
            better="lower",
            peer=usage["cpu_s"] if usage else None,
            peer_name=peer_name,
            goal=goal,
            goal_is="ratio",
        ),
        harness.Row(
            metric=f"{played.name}: memory for a million samples a period",
            ours=played.memory_bytes / 2**20 / a_period,
            unit="MiB",
            better="lower",
            peer=usage["memory_bytes"] / 2**20 / a_period if usage else None,
            peer_name=peer_name,
            goal=goal,
            goal_is="ratio",
        ),
    ]


def _prometheus(
    profile: str, machines: int, warm_s: float, seconds: float, place: pathlib.Path
) -> dict[str, float] | None:
    """CPU seconds for each million samples, and memory; None where there is no Prometheus to be had."""
    binary = _binary()
    if binary is None:
        return None
    with measure.Worker("benchmarks.pipeline_worker", "pages", profile, machines) as pages:
        facts = pages.hear(timeout_s=600)
        target = f"static_configs: [{{targets: ['127.0.0.1:{facts['port']}']}}]"
        jobs = "\n".join(
            f"  - job_name: p{number}\n    metrics_path: /m/{number}\n    {target}"
            for number in range(facts["pages"])
        )
        settings_file = place / "prometheus.yml"
        settings_file.write_text(f"global: {{scrape_interval: {PERIOD_S:g}s}}\nscrape_configs:\n{jobs}\n")
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={settings_file}",
                f"--storage.tsdb.path={place / f'prometheus-{profile}'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            server = psutil.Process(process.pid)
            time.sleep(warm_s + PERIOD_S)  # pages are scraped at times that it chooses within a period
            before = server.cpu_times()
            pages.tell("count")
            first = pages.hear()["samples"]
            time.sleep(seconds)
            after, memory = server.cpu_times(), server.memory_full_info().pss
            pages.tell("count")
            samples = pages.hear()["samples"] - first
        finally:
            process.terminate()
            process.wait(60)
    if not samples:
        return None
    used_s = after.user + after.system - before.user - before.system
    return {"cpu_s": used_s / (samples / MILLION), "memory_bytes": float(memory)}


def _binary() -> str | None:
    """The one on this machine, or Debian's, fetched once and unpacked without installing it."""
    if path := shutil.which("prometheus"):
        return path
    cache = (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
        / "muster"
        / "prometheus"
    )
    binary = cache / "usr" / "bin" / "prometheus"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["apt-get", "download", "prometheus"], cwd=cache, check=True, capture_output=True, timeout=60
            )
            package = next(cache.glob("prometheus_*.deb"))
            subprocess.run(["dpkg", "-x", package, cache], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError, StopIteration):
            return None
    return str(binary) if binary.exists() else None
