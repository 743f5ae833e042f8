"""`muster.core.duplicates` for arrays: one step for each of many sources."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from muster.core import duplicates

Bools = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


def observe(high: Ints, bits: Bits, sequence: Ints) -> tuple[Bools, Ints, Bits]:
    """Which sequences are new, and the new highest sequences and bits of all sources."""
    ahead = sequence - high
    last = duplicates.KEPT - 1
    shifted = bits << np.clip(ahead, 0, last).astype(np.uint64)
    moved = np.where(ahead <= last, shifted, np.uint64(0))
    bit = np.uint64(1) << np.clip(-ahead, 0, last).astype(np.uint64)
    new: Bools = (ahead > 0) | ((-ahead <= last) & ((bits & bit) == 0))
    return new, np.maximum(high, sequence), np.where(new, moved | bit, bits)
