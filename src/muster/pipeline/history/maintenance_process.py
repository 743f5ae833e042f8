"""Maintains the history once: ``python -m muster.pipeline.history.maintenance_process``.

In the driver it would delay batches, because merging files takes all cores for seconds.  This process has a
lower priority, and its memory is free again afterwards.

The request is a line of JSON on standard input.  Before each step the process writes an empty line and waits
for one, so that the driver decides whether it goes on; the end of standard input ends it.  The last line of
standard output is the result.
"""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec

NICE = 15


class MaintenanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    root: str
    now_s: float
    max_bytes: int
    max_age_s: float
    keep_s: float
    with_vacuum: bool


class MaintenanceResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    done: dict[str, int] = {}
    error: str = ""


def run(request: MaintenanceRequest) -> MaintenanceResult:
    from muster.pipeline.history import maintenance

    limits = maintenance.MaintenanceLimits(request.max_bytes, request.max_age_s, request.keep_s)
    try:
        return MaintenanceResult(
            done=maintenance.run(
                request.root,
                request.now_s,
                limits,
                with_vacuum=request.with_vacuum,
                check=_wait_for_permission,
            )
        )
    except Exception as error:  # noqa: BLE001 (Arrow, DuckDB and delta-rs raise exceptions of many types)
        return MaintenanceResult(error=f"{type(error).__name__}: {error}")


def _wait_for_permission() -> None:
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    if not sys.stdin.buffer.readline():
        raise SystemExit(1)


def main() -> int:
    os.nice(NICE)
    with contextlib.suppress(AttributeError, OSError):  # only on Linux
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=MaintenanceRequest)
    sys.stdout.buffer.write(msgspec.json.encode(run(request)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
