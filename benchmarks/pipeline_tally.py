"""Whether every report that was sent is in the history exactly once.

For each machine there are two numbers: how many reports, and the sum of a hash of (boot, sequence) of each.
Counts alone would not notice one report lost and another doubled; the sum does.  The number of a machine is
the last part of its name.
"""

from __future__ import annotations

import pathlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from muster.pipeline.history import delta, tables
from muster.simulate import realistic

DIGITS = 7  # of a machine's number in its name
COLUMNS = ("machine", "boot", "sequence")


class Tally:
    def __init__(self, machines: int) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(machines, np.int64)
        self.sums: npt.NDArray[np.uint64] = np.zeros(machines, np.uint64)

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        names = pc.utf8_slice_codeunits(rows.column("machine"), -DIGITS)
        number = np.asarray(pc.cast(names, pa.int64()))
        boot, sequence = (np.asarray(rows.column(name)) for name in ("boot", "sequence"))
        np.add.at(self.counts, number, 1)
        np.add.at(self.sums, number, realistic.hashed(boot, sequence))

    def wrong(self, other: Tally) -> int:
        """Reports that are missing from one of the two, or too many in it."""
        counted = np.abs(self.counts - other.counts)
        # As many reports, but not the same: at least one is lost and another there twice.
        exchanged = (counted == 0) & (self.sums != other.sums)
        return int(counted.sum() + 2 * exchanged.sum())

    def save(self, path: pathlib.Path) -> None:
        with path.open("wb") as file:
            np.savez(file, counts=self.counts, sums=self.sums)

    @classmethod
    def load(cls, paths: list[pathlib.Path]) -> Tally:
        """The sum of several."""
        total = cls(0)
        for path in paths:
            with np.load(path) as stored:
                total._grow(len(stored["counts"]))
                total.counts[: len(stored["counts"])] += stored["counts"]
                total.sums[: len(stored["sums"])] += stored["sums"]
        return total

    @classmethod
    def read(cls, root: pathlib.Path, machines: int) -> Tally:
        """What the history holds."""
        total = cls(machines)
        for batch in delta.Snapshot(root, tables.NODES).dataset().to_batches(columns=list(COLUMNS)):
            if batch.num_rows:
                total.add(pa.Table.from_batches([batch]))
        return total

    def _grow(self, machines: int) -> None:
        more = max(0, machines - len(self.counts))
        self.counts = np.concatenate([self.counts, np.zeros(more, np.int64)])
        self.sums = np.concatenate([self.sums, np.zeros(more, np.uint64)])
