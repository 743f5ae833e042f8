"""``make sim SEED=17`` replays a seed; ``make sim N=1000`` searches."""

from __future__ import annotations

# isort: off
from tests.sim import entropy  # first: Muster's default arguments must be virtual clocks
# isort: on

import argparse
import logging
import sys
import time
import warnings

from muster.core.telemetry import log

TAIL = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed, and show the trace")
    parser.add_argument("--count", type=int, default=100, help="how many seeds to search")
    parser.add_argument("--first", type=int, default=0, help="the first seed of a search")
    parser.add_argument("--parts", default="", help="only these parts, separated by commas")
    parser.add_argument("--trouble-s", type=float, help="virtual seconds with faults")
    parser.add_argument("--all", action="store_true", help="show the whole trace, not only its end")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--stop", action="store_true", help="stop a search at the first violation")
    arguments = parser.parse_args()
    return replay(arguments) if arguments.seed is not None else search(arguments)


def replay(arguments: argparse.Namespace) -> int:
    from tests.sim import run

    started_s = time.perf_counter()
    verdict = run.run(arguments.seed, trouble_s=arguments.trouble_s, verbose=True, only=arguments.parts)
    took_s = time.perf_counter() - started_s
    lines = verdict.history.trace
    shown = lines if arguments.all else lines[-TAIL:]
    if len(shown) < len(lines):
        _say(f"… {len(lines) - len(shown)} earlier lines (--all shows them)")
    for line in shown:
        _say(line)
    _say(
        f"seed {verdict.seed}: {verdict.simulated_s:.0f} virtual seconds in {took_s:.2f} s, "
        f"{len(verdict.history.operations)} operations, {verdict.hops} messages, "
        f"trace {verdict.history.digest[:16]}"
    )
    for violation in verdict.violations:
        _say(f"VIOLATION {violation}")
    if not verdict.violations:
        _say("no violation")
    return 1 if verdict.violations else 0


def search(arguments: argparse.Namespace) -> int:
    from tests.sim import run

    started_s = time.perf_counter()
    failed: dict[int, list[str]] = {}
    operations = simulated_s = hops = done = 0.0
    for seed in range(arguments.first, arguments.first + arguments.count):
        verdict = run.run(seed, trouble_s=arguments.trouble_s, only=arguments.parts)
        done += 1
        operations += len(verdict.history.operations)
        simulated_s += verdict.simulated_s
        hops += verdict.hops
        if verdict.violations:
            failed[seed] = verdict.violations
            _say(f"seed {seed}: VIOLATION {verdict.violations[0]}")
            if arguments.stop:
                break
        took_s = time.perf_counter() - started_s
        if not arguments.quiet and (done % 10 == 0 or sys.stdout.isatty()):
            _say(f"{done:.0f} of {arguments.count} seeds, {len(failed)} failed, {took_s / done:.2f} s each")
    took_s = time.perf_counter() - started_s
    _say(
        f"{done:.0f} seeds in {took_s:.0f} s: {simulated_s / 3600:.1f} virtual hours, "
        f"{operations:.0f} operations, {hops:.0f} messages, {len(failed)} seeds with violations"
    )
    for seed, violations in failed.items():
        _say(f"  make sim SEED={seed}{_options(arguments)}    # {len(violations)}: {violations[0][:120]}")
    return 1 if failed else 0


def _options(arguments: argparse.Namespace) -> str:
    parts = f" PARTS={arguments.parts}" if arguments.parts else ""
    return parts + (f" TROUBLE={arguments.trouble_s:g}" if arguments.trouble_s else "")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    entropy.require_fixed_hashes()
    # The garbage collector closes the coroutines of killed processes: what they raise then does not matter.
    sys.unraisablehook = lambda _: None
    logging.getLogger(log.ROOT).addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    sys.exit(main())
