"""Faults of real processes: run workloads against a domain, apply faults, store histories and check them.

make faults                                            every fault that this machine allows
make faults NEMESIS=kill-broker,freeze-broker          only these faults
make faults WORKLOAD=contexts,queues SECONDS=30 SEED=7
python -m tests.faults check FOLDER                    check stored histories again
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path

from muster.core.telemetry import log
from tests.faults import checker, deployment, nemesis, network, runner, table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=["run", "check"], default="run")
    parser.add_argument("folder", nargs="?", type=Path, help="of the histories")
    parser.add_argument("--workload", default="", help=f"of {', '.join(checker.WORKLOADS)}; all by default")
    parser.add_argument("--nemesis", default="", help=f"of {', '.join(nemesis.FAULTS)}; all by default")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long a fault lasts (15)")
    parser.add_argument("--seed", type=int, default=1, help="of random choices (1)")
    parser.add_argument("--runs", type=int, default=1, help="of each fault (1)")
    parser.add_argument("--save", action="store_true", help="add the results to those of the documentation")
    arguments = parser.parse_args()
    folder = arguments.folder or Path("tests") / "artefacts" / "faults" / time.strftime("%Y%m%d-%H%M%S")
    if arguments.command == "check":
        results = [result for file in sorted(folder.glob("*.jsonl")) for result in checker.check(file)]
        if arguments.save:
            table.save(results)
    else:
        network.enter()
        folder = folder.absolute()
        results = asyncio.run(run(arguments, folder))
    sys.stdout.write(table.text(results))
    violations = [violation for result in results for violation in result.violations]
    for violation in violations:
        sys.stdout.write(f"VIOLATION {violation}\n")
    sys.stdout.write(f"{len(violations)} violations; histories in {folder}\n")
    return 1 if violations else 0


async def run(arguments: argparse.Namespace, folder: Path) -> list[checker.Result]:
    workloads = chosen(arguments.workload, list(checker.WORKLOADS))
    faults = chosen(arguments.nemesis, list(nemesis.FAULTS))
    if (reason := network.missing()) is not None:
        left_out = [name for name in faults if nemesis.FAULTS[name].kind == "machines" or name == "disk-full"]
        deployment.report(f"left out, because {reason}: {', '.join(left_out)}")
        faults = [name for name in faults if name not in left_out]
    results = []
    for kind in deployment.KINDS:
        names = [name for name in faults if nemesis.FAULTS[name].kind == kind]
        if not names:
            continue
        began_s = time.monotonic()
        async with runner.running(kind, arguments.seed) as domain:
            deployment.report(f"{kind}: up after {time.monotonic() - began_s:.0f} s")
            for number, (name, turn) in enumerate(
                ((name, turn) for turn in range(arguments.runs) for name in names), 1
            ):
                file = folder / f"{name}-{turn}.jsonl"
                try:
                    await runner.Run(domain, file, name, workloads, arguments.seed + turn).execute(
                        arguments.seconds
                    )
                except Exception as error:  # noqa: BLE001  (the history shows that the run is incomplete)
                    deployment.report(f"{name}: {type(error).__name__}: {error}")
                await asyncio.to_thread(runner.keep_logs, domain, folder / "logs")
                checked = list(checker.check(file))
                results += checked
                if arguments.save:
                    table.save(results)
                deployment.report(
                    f"{kind} {number} of {len(names) * arguments.runs}: {name}: "
                    + ", ".join(f"{each.workload} {each.unavailable_s:.1f} s" for each in checked)
                    + f"; {sum(len(each.violations) for each in checked)} violations"
                )
    return results


def chosen(text: str, known: list[str]) -> list[str]:
    names = text.split(",") if text else known
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


if __name__ == "__main__":
    logging.getLogger(log.ROOT).addHandler(logging.NullHandler())
    sys.exit(main())
