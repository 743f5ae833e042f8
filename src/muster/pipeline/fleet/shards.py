"""Which shard of the fleet's state a machine belongs to: a hash of its name. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# Powers of an odd number, for the hash of names of up to 256 characters.
_POWERS = np.multiply.accumulate(np.full(1024, 0x9E3779B97F4A7C15, np.uint64))


def shards_of(names: pa.StringArray, shards: int) -> npt.NDArray[np.int64]:
    """The shard of each machine: the same in every process and version."""
    _, offsets, data = names.buffers()
    ends = np.frombuffer(offsets, np.int32)[names.offset : names.offset + len(names) + 1].astype(np.int64)
    size = np.diff(ends)
    starts = ends[:-1] - ends[0]
    letters = np.zeros(ends[-1] - ends[0] + 1, np.uint64)  # the last is read for an empty name at the end
    if data is not None:
        letters[:-1] = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    position = np.arange(len(letters)) - np.repeat(np.r_[starts, ends[-1] - ends[0]], np.r_[size, 1])
    letters = (letters + np.uint64(1)) * _POWERS[position % len(_POWERS)]
    hashed = np.add.reduceat(letters, np.r_[starts, ends[-1] - ends[0]])[:-1]
    hashed[size == 0] = 0
    hashed ^= hashed >> np.uint64(32)
    hashed *= np.uint64(0xD6E8FEB86659FD93)
    hashed ^= hashed >> np.uint64(32)
    return (hashed % np.uint64(shards)).astype(np.int64)
