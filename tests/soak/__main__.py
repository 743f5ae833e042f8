"""``make soak MINUTES=60``: steady load, a fault every minute, ledgers and slopes."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from muster.trust.permissions import roles
from tests.pipeline import test_history
from tests.soak import domain as domain_
from tests.soak import faults, result, sizes, trends, workloads

FAULT_S = 60.0
SETTLE_S = 30.0  # after the last fault
PROGRESS_S = 60.0
GROWS_BY_DESIGN = ("soak (load)", "farm (load)", "logs")  # entries of ledgers, and logs up to their budget


async def soak(minutes: float, fleet: int, seed: int, *, spark: bool, folder: pathlib.Path) -> dict[str, Any]:
    domain = domain_.SoakDomain(folder, fleet=fleet, spark=spark)
    async with domain.up():
        work = workloads.Workloads(domain)
        await work.start()
        began_s = time.monotonic()
        injector = faults.FaultInjector(domain, seed, began_s, spare_after_s=30 * minutes)
        operator = await domain.connect("sampler", roles.Role.OPERATOR)
        sampler = sizes.Sampler(domain, injector, operator, began_s)
        _report(f"soak: {fleet:,} machines every {domain_.PERIOD_S:g} s, {minutes:g} minutes, seed {seed}")
        running = [asyncio.create_task(sampler.run()), asyncio.create_task(injector.run(FAULT_S))]
        while (elapsed_s := time.monotonic() - began_s) < 60 * minutes - SETTLE_S:
            await asyncio.sleep(min(PROGRESS_S, 60 * minutes - SETTLE_S - elapsed_s))  # pace of the lines
            _report(_progress(work, injector, sampler, time.monotonic() - began_s))
            for task in running:
                if task.done():
                    task.result()
        running[1].cancel()
        await asyncio.sleep(SETTLE_S)  # pace of the drill
        elapsed_s = time.monotonic() - began_s
        running[0].cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await work.stop()
        violations = work.violations()
        violations += [
            f"{fault.name} was {fault.fault} and not replaced"
            for fault in injector.applied
            if fault.replaced_s is None
        ]
        violations += await _check_history(domain) if spark else []
    found_trends = [trends.trend(*key, samples) for key, samples in sampler.series.items()]
    found_trends = [
        dataclasses.replace(row, is_level=row.is_level or row.subject in GROWS_BY_DESIGN)
        for row in found_trends
    ]
    summary = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "minutes": round(elapsed_s / 60, 1),
        "fleet": fleet,
        "spark": spark,
        "seed": seed,
        "cores": os.cpu_count(),
        "cpu_share": round(sampler.cpu_s / elapsed_s / (os.cpu_count() or 1), 3),
        "faults": [dataclasses.asdict(fault) for fault in injector.applied],
        "deliveries": [
            {
                "name": ledger.name,
                "accepted": len(ledger.accepted_at_s),
                "in_doubt": len(ledger.in_doubt),
                "received": len(ledger.received_at_s),
                "marked": ledger.marked,
                "delay_max_s": round(ledger.delay_max_s, 1),
            }
            for ledger in work.deliveries
        ],
        "writes": [
            {"name": ledger.name, "writes": ledger.writes, "reads": ledger.reads} for ledger in work.writes
        ],
        "commands": len(work.commands),
        "failures": work.failures,
        "late_max": work.late_max,
        "sampling_failures": sampler.failures,
        "trends": [
            dataclasses.asdict(row) for row in sorted(found_trends, key=lambda row: (row.size, row.subject))
        ],
        "violations": violations,
    }
    return {"summary": summary, "series": sampler.series}


async def _check_history(domain: domain_.SoakDomain) -> list[str]:
    """Every report is stored once."""
    settings = domain.settings()
    root = pathlib.Path(settings.pipeline.history_root(settings.domain.folder))
    rows = await asyncio.to_thread(test_history.read, root)
    keys = [(row["machine"], row["boot"], row["sequence"]) for row in rows]
    _report(f"history: {len(keys):,} reports of {len({key[0] for key in keys}):,} machines")
    return [] if len(keys) == len(set(keys)) else [f"history: {len(keys) - len(set(keys))} reports doubled"]


def _progress(
    work: workloads.Workloads, injector: faults.FaultInjector, sampler: sizes.Sampler, elapsed_s: float
) -> str:
    accepted = sum(len(ledger.accepted_at_s) for ledger in work.deliveries)
    received = sum(len(ledger.received_at_s) for ledger in work.deliveries)
    last = injector.applied[-1] if injector.applied else None
    fault = "" if last is None else f"; last fault: {last.name} {last.fault}, replaced {last.replaced_s} s"
    memory = sum(samples[-1].value for (_, size), samples in sampler.series.items() if size == "memory")
    share = sampler.cpu_s / elapsed_s / (os.cpu_count() or 1)
    late = sum(len(ledger.overdue(time.monotonic() - workloads.LATE_S)) for ledger in work.deliveries)
    return (
        f"{elapsed_s / 60:5.1f} min: {accepted:,} acknowledged, {received:,} received, {late} late; "
        f"{sum(ledger.writes for ledger in work.writes):,} writes; {memory / 1e6:,.0f} MB, "
        f"{share:.0%} CPU{fault}{''.join(f'; {problem}' for problem in work.problems())}"
    )


def _report(line: str) -> None:
    sys.stdout.write(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--fleet", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the home and all samples here")
    parser.add_argument("--write", action="store_true", help="store the result for the documentation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-soak-") as folder:
        home = options.keep or pathlib.Path(folder) / "home"
        done = asyncio.run(
            soak(options.minutes, options.fleet, options.seed, spark=not options.no_spark, folder=home)
        )
    if options.keep:
        rows = [
            [*key, *dataclasses.astuple(sample)] for key, taken in done["series"].items() for sample in taken
        ]
        (home / "samples.json").write_text(json.dumps(rows))
    sys.stdout.write(result.text(done["summary"]) + "\n")
    if options.write:
        result.write(done["summary"], done["series"])
    return 1 if done["summary"]["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
