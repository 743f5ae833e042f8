"""Fits the parameters of the capacity model to measured batches: the cost of a batch and of a report.

A batch takes ``fixed_s + report_s * reports``.  Both are fitted by least squares to the stored progress of
the pipeline.  They determine the largest fleet whose batches end before the next batch is due, unless the
line explains too little of the measurements.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from muster.core import errors, files
from muster.pipeline import protocol

PROGRESS_NAME = "progress.jsonl"
R2_MIN = 0.5
SIGNIFICANT = 3.0  # standard errors
KEPT_BYTES = 8 << 20


class CostFit(msgspec.Struct, frozen=True, kw_only=True):
    batches: int
    fixed_s: float
    report_s: float
    report_s_error: float  # standard error
    r2: float  # coefficient of determination: the share of the variance that the line explains
    reports_min: int  # in a batch
    reports_max: int
    root_holding_s: float  # the trigger: the holding time of the root in the model

    def problem(self) -> str:
        """Why the line must not be used to extrapolate; empty if it may be."""
        if self.report_s - SIGNIFICANT * self.report_s_error <= 0:
            return "the time of a batch does not grow measurably with its reports"
        if self.r2 < R2_MIN:
            return f"the number of reports explains only {self.r2:.0%} of the variance of the time"
        if self.fixed_s >= self.root_holding_s:
            return "an empty batch takes longer than the trigger"
        return ""

    def require_usable(self) -> None:
        """`errors.InvalidInput` if the line must not be used to extrapolate."""
        if problem := self.problem():
            raise errors.InvalidInput(
                f"the measured batches allow no forecast: {problem}",
                hint="let the pipeline process batches of different sizes, for example with "
                "`muster simulate sensors`",
            )

    def reports_per_s_max(self) -> float:
        """The largest rate that the root can process."""
        return max(0.0, self.root_holding_s - self.fixed_s) / self.report_s / self.root_holding_s

    def machines(self, period_s: float) -> float:
        """The largest number of machines that the root can process."""
        self.require_usable()
        return self.reports_per_s_max() * period_s


def append_sample(path: Path, progress: protocol.BatchProgress) -> None:
    """Append a batch; at the size limit the older half is removed."""
    if path.exists() and path.stat().st_size > KEPT_BYTES:
        lines = path.read_bytes().splitlines(keepends=True)
        files.write(path, b"".join(lines[len(lines) // 2 :]))
    files.append_line(path, msgspec.json.encode(progress))


def read(path: Path) -> list[protocol.BatchProgress]:
    """Read the samples; an incomplete line is skipped."""
    samples = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            samples.append(msgspec.json.decode(line, type=protocol.BatchProgress))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return samples


def fit(batches: list[protocol.BatchProgress], *, trigger_s: float) -> CostFit:
    """`errors.InvalidInput` if there are too few samples."""
    # The first batch of a process includes the start of Spark's workers.
    usable = [batch for batch in batches if batch.batch_s > 0 and batch.batch > 0]
    rows = np.array([batch.rows for batch in usable], np.float64)
    took = np.array([batch.batch_s for batch in usable], np.float64)
    if len(usable) < 3 or np.ptp(rows) == 0:
        raise errors.InvalidInput(
            f"{len(usable)} batches are too few to fit a line, or all have the same size",
            hint="let the pipeline run for longer",
        )
    (slope, fixed), *_ = np.linalg.lstsq(np.stack([rows, np.ones(len(rows))], axis=1), took, rcond=None)
    left = took - (fixed + slope * rows)
    total = float(((took - took.mean()) ** 2).sum())
    unexplained = float((left**2).sum())
    variance = unexplained / (len(rows) - 2)
    return CostFit(
        batches=len(usable),
        fixed_s=float(fixed),
        report_s=float(slope),
        report_s_error=float(np.sqrt(variance / ((rows - rows.mean()) ** 2).sum())),
        r2=1 - unexplained / total if total else 0.0,
        reports_min=int(rows.min()),
        reports_max=int(rows.max()),
        root_holding_s=trigger_s,
    )
