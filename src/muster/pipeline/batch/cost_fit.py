"""From measured batches to the parameters of the analytic model: what a batch costs, and what each report.

A batch takes ``fixed_s + report_s * reports``.  The two are fitted by least squares to the progress that the
pipeline keeps of its batches; from them follows the largest fleet whose batches end before the next is due.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np

from muster.core import errors
from muster.pipeline import protocol

PROGRESS_NAME = "progress.jsonl"
KEPT_BYTES = 8 << 20


class CostFit(msgspec.Struct, frozen=True):
    batches: int
    fixed_s: float
    report_s: float
    r2: float  # 1: the line explains everything
    root_holding_s: float  # the trigger: what the model calls the root's holding time

    def machines(self, period_s: float) -> float:
        """The most that a root of this speed can watch."""
        if self.report_s <= 0:
            return float("inf")
        return max(0.0, self.root_holding_s - self.fixed_s) / self.report_s / self.root_holding_s * period_s


def append_sample(path: Path, progress: protocol.BatchProgress) -> None:
    """Append one batch; at a bound the older half goes."""
    if path.exists() and path.stat().st_size > KEPT_BYTES:
        lines = path.read_bytes().splitlines(keepends=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(b"".join(lines[len(lines) // 2 :]))
        fresh.replace(path)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(progress) + b"\n")


def read(path: Path) -> list[protocol.BatchProgress]:
    """What can be read: a line that was being written when the machine failed is passed over."""
    samples = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            samples.append(msgspec.json.decode(line, type=protocol.BatchProgress))
        except msgspec.MsgspecError:
            continue
    return samples


def fit(batches: list[protocol.BatchProgress], *, trigger_s: float) -> CostFit:
    """`errors.InvalidInput` where there is too little to fit a line to."""
    # The first batch of a process also starts Spark's workers.
    usable = [batch for batch in batches if batch.batch_s > 0 and batch.batch > 0]
    rows = np.array([batch.rows for batch in usable], np.float64)
    took = np.array([batch.batch_s for batch in usable], np.float64)
    if len(usable) < 3 or np.ptp(rows) == 0:
        raise errors.InvalidInput(
            f"{len(usable)} batches of different size are too few to fit a line to",
            hint="let it run for longer",
        )
    (slope, fixed), *_ = np.linalg.lstsq(np.stack([rows, np.ones(len(rows))], axis=1), took, rcond=None)
    left = took - (fixed + slope * rows)
    total = float(((took - took.mean()) ** 2).sum())
    r2 = 1 - float((left**2).sum()) / total if total else 1.0
    return CostFit(len(usable), float(fixed), float(slope), r2, trigger_s)
