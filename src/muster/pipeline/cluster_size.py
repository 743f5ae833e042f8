"""How large streams, Spark's cluster and the history must be for a fleet, from measured costs. Pure.

The costs are those of a realistic fleet (20 machines a group, 20 to 50 metrics a report), in CPU time of one
core of the machine of `benchmarks/results`:

- `SOURCE_US`, `SHARD_US`: `python -m benchmarks.pipeline_state realistic 100000 4`, for each report;
- `MERGE_US`: for each group of a window at the executors, with some shares: ``--shards 8`` used 91;
- `DRIVER_US`: for each group of a window at the driver, which is one process. The same command has 6; what
  publishing takes is assumed with a reserve: some 40 in a run of ``benchmarks/pipeline_domain.py``;
- `SHARE_US`: for each further shard that has machines of a group, in each window: 24,000 machines in 1,200
  groups took 14.0 µs a report with 8 shards and 33.6 with 64, on two busy cores: some 50 then;
- `SPARK_US`: Spark's Java process; assumed, with a reserve: `benchmarks/results/pipeline.json` has 6.1 % of
  two cores for 100,000 plain reports a second, which is 1.2;
- `STREAM_BYTES`, `HISTORY_BYTES`, `STATE_BYTES`: bytes of a report in the stream and in merged files of the
  history (new ones have 281), and of a machine in the checkpoint: 197 in each of ten files that are kept.
"""

from __future__ import annotations

import math

from muster.core.settings import retention

SOURCE_US = 2.6
SHARD_US = 10.0
SPARK_US = 3.0
MERGE_US = 100.0
DRIVER_US = 50.0
SHARE_US = 30.0
STREAM_BYTES = retention.REPORT_BYTES
HISTORY_BYTES = 220
STATE_BYTES = 2000
USED = 0.6  # share of the cores that are busy, so that a batch catches up
EXECUTOR_CORES = 4
SHARD_MACHINES = 100_000  # of one shard: some 100 MB in a Python worker while it is processed
MESSAGE_REPORTS = 1000
DAY_S = 86400


def cluster_size(
    machines: int,
    groups: int,
    *,
    period_s: float,
    trigger_s: float,
    window_s: float,
    hours: float,
    replicas: int,
    shards: int = 0,
) -> dict[str, float]:
    """``hours``: of reports in the stream; ``replicas``: of the stream; ``shards``: 0, as many as are needed.

    ``report_us``: the CPU of a report; ``driver_s``: the driver's time for a window, which must be shorter
    than the window (``holds``).
    """
    reports_s = machines / period_s
    busy_us = reports_s * (SOURCE_US + SHARD_US + SPARK_US) + groups / window_s * MERGE_US
    needed = shards or max(2, math.ceil(machines / SHARD_MACHINES), math.ceil(busy_us / 1e6 / USED))
    shares = min(machines, groups * needed) - min(machines, groups * 2)
    busy_us += max(0, shares) / window_s * SHARE_US
    cores = max(2, math.ceil(busy_us / 1e6 / USED))
    needed = shards or cores * math.ceil(needed / cores)
    driver_s = groups * DRIVER_US / 1e6
    return {
        "machines": machines,
        "groups": groups,
        "reports_s": reports_s,
        "stream_bytes_s": reports_s * STREAM_BYTES,
        "stream_bytes": retention.report_bytes(machines, period_s, hours),
        "broker_bytes_s": reports_s * STREAM_BYTES * (replicas + 1),  # stored on each replica, and read once
        "report_us": (busy_us + driver_s / window_s * 1e6) / reports_s,
        "executor_cores": cores,
        "executors": math.ceil(cores / EXECUTOR_CORES),
        "partitions": cores,
        "shards": needed,
        "splits": cores,
        "max_messages": math.ceil(3 * reports_s * trigger_s / MESSAGE_REPORTS),  # to catch up
        "state_bytes": machines * STATE_BYTES,
        "history_day_bytes": int(reports_s * DAY_S * HISTORY_BYTES),
        "driver_s": driver_s,
        "holds": driver_s < window_s,
    }
