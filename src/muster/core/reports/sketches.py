"""Two small mergeable summaries: quantiles with a known relative error, and how many different names.

`QuantileSketch` counts values in buckets (the DDSketch idea).  A bucket is the exponent of a number and the
first bits of its mantissa.  These are the upper bits of a float in memory, so one shift finds the bucket,
without a logarithm.  Any quantile is off by at most `RELATIVE_ERROR` of itself, whatever the values are and
however often sketches are merged.  With more than `BUCKETS_MAX` buckets, those nearest to zero are joined:
high quantiles stay right.  `buckets` and `middles` are also the histogram of `muster.pipeline.fleet.cells`,
which uses fewer bits: each of its buckets is the union of two of these.

`DistinctSketch` stores hashes of names while they are few, and is exact then; beyond `EXACT_MAX` it stores
the registers of a HyperLogLog, with a standard error of about 1.6 %.

Merging is associative, commutative and has an empty value, so it does not matter in which tree it is done.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from muster.core import messages

MANTISSA_BITS = 6
RELATIVE_ERROR = 0.5 / (1 << MANTISSA_BITS)
BUCKETS_MAX = 4096  # of positive numbers, and of negative ones
EXACT_MAX = 256

_BIAS = 1023  # of the exponent of a float
_REGISTERS = 4096
_INDEX_BITS = 12

_Bucket = Annotated[int, msgspec.Meta(ge=-_BIAS << MANTISSA_BITS, lt=_BIAS + 1 << MANTISSA_BITS)]
_Buckets = dict[_Bucket, messages.Count]
_quantiles = msgspec.msgpack.Decoder(tuple[messages.Count, _Buckets, _Buckets])


def buckets(values: npt.NDArray[np.float64], mantissa_bits: int = MANTISSA_BITS) -> npt.NDArray[np.int64]:
    """The buckets of positive numbers, ascending with them; that of 1.0 is 0.

    Zero has a lower bucket than all other numbers, and a negative number one far below that.
    """
    numbers: npt.NDArray[np.int64] = np.ascontiguousarray(values).view(np.int64) >> (52 - mantissa_bits)
    numbers -= _BIAS << mantissa_bits
    return numbers


def middles(numbers: npt.NDArray[np.int64], mantissa_bits: int = MANTISSA_BITS) -> npt.NDArray[np.float64]:
    """A value within the error of both ends of each bucket."""
    upper = numbers + (_BIAS << mantissa_bits) << (52 - mantissa_bits)
    return (upper | 1 << (51 - mantissa_bits)).view(np.float64)


class QuantileSketch:
    """A sketch of finite numbers."""

    __slots__ = ("_above", "_below", "_zeros")

    def __init__(self) -> None:
        self._zeros = 0
        self._above: dict[int, int] = {}
        self._below: dict[int, int] = {}

    @classmethod
    def of(cls, values: npt.ArrayLike) -> QuantileSketch:
        sketch = cls()
        numbers = np.asarray(values, np.float64)
        sketch._zeros = int(np.count_nonzero(numbers == 0))
        sketch._above = _bucketed(numbers[numbers > 0])
        sketch._below = _bucketed(-numbers[numbers < 0])
        sketch._bound()
        return sketch

    @property
    def count(self) -> int:
        return self._zeros + sum(self._above.values()) + sum(self._below.values())

    def merge(self, other: QuantileSketch) -> None:
        self._zeros += other._zeros
        _add(self._above, other._above)
        _add(self._below, other._below)
        self._bound()

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` of all values are; None without values."""
        rank = share * (self.count - 1)
        seen = 0
        for bucket in sorted(self._below, reverse=True):
            seen += self._below[bucket]
            if seen > rank:
                return -_middle(bucket)
        seen += self._zeros
        if seen > rank:
            return 0.0
        for bucket in sorted(self._above):
            seen += self._above[bucket]
            if seen > rank:
                return _middle(bucket)
        return None

    def histogram(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """The middles of its buckets from the least on, and how many values are in each."""
        quantiles = [
            *((-_middle(bucket), self._below[bucket]) for bucket in sorted(self._below, reverse=True)),
            *([(0.0, self._zeros)] if self._zeros else []),
            *((_middle(bucket), self._above[bucket]) for bucket in sorted(self._above)),
        ]
        return np.array([value for value, _ in quantiles]), np.array(
            [count for _, count in quantiles], np.int64
        )

    def __bytes__(self) -> bytes:
        return msgspec.msgpack.encode((self._zeros, self._above, self._below))

    @classmethod
    def from_bytes(cls, data: bytes) -> QuantileSketch:
        sketch = cls()
        try:
            sketch._zeros, sketch._above, sketch._below = _quantiles.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise messages.MalformedMessage(f"not a sketch of quantiles: {str(error)[:100]}") from error
        sketch._bound()
        return sketch

    def _bound(self) -> None:
        for counts in (self._above, self._below):
            if len(counts) > BUCKETS_MAX:
                nearest = sorted(counts)
                joined = nearest[len(nearest) - BUCKETS_MAX]
                for bucket in nearest[: len(nearest) - BUCKETS_MAX]:
                    counts[joined] += counts.pop(bucket)


def _bucketed(values: npt.NDArray[np.float64]) -> dict[int, int]:
    numbers, counts = np.unique(buckets(values), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _middle(bucket: int) -> float:
    return float(middles(np.array([bucket]))[0])


def _add(into: dict[int, int], other: Mapping[int, int]) -> None:
    for bucket, count in other.items():
        into[bucket] = into.get(bucket, 0) + count


class DistinctSketch:
    __slots__ = ("_exact", "_registers")

    def __init__(self) -> None:
        self._exact: set[int] | None = set()
        self._registers: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    @classmethod
    def of(cls, names: Iterable[str]) -> DistinctSketch:
        sketch = cls()
        sketch._take({_hash(name) for name in names})
        return sketch

    def merge(self, other: DistinctSketch) -> None:
        if other._exact is not None:
            self._take(other._exact)
        else:
            self._grow()
            np.maximum(self._registers, other._registers, out=self._registers)

    def count(self) -> int:
        if self._exact is not None:
            return len(self._exact)
        empty = int(np.count_nonzero(self._registers == 0))
        inverse = float(np.sum(2.0 ** -self._registers.astype(float)))
        raw = 0.7213 / (1 + 1.079 / _REGISTERS) * _REGISTERS**2 / inverse
        if raw <= 2.5 * _REGISTERS and empty:
            raw = _REGISTERS * math.log(_REGISTERS / empty)  # better while many registers are empty
        return round(raw)

    def __bytes__(self) -> bytes:
        if self._exact is not None:
            return np.sort(np.fromiter(self._exact, np.uint64, len(self._exact))).tobytes()
        return self._registers.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> DistinctSketch:
        sketch = cls()
        if len(data) <= 8 * EXACT_MAX and len(data) % 8 == 0:
            sketch._exact = set(np.frombuffer(data, np.uint64).tolist())
        elif len(data) == _REGISTERS:
            sketch._exact = None
            sketch._registers = np.minimum(np.frombuffer(data, np.uint8), 64 - _INDEX_BITS + 1)
        else:
            raise messages.MalformedMessage(f"{len(data)} bytes are no count of different names")
        return sketch

    def _take(self, hashes: set[int]) -> None:
        if self._exact is not None:
            self._exact |= hashes
            if len(self._exact) > EXACT_MAX:
                self._grow()
        else:
            self._register(hashes)

    def _grow(self) -> None:
        if self._exact is not None:
            hashes, self._exact = self._exact, None
            self._registers = np.zeros(_REGISTERS, np.uint8)
            self._register(hashes)

    def _register(self, hashes: set[int]) -> None:
        hash_array: npt.NDArray[Any] = np.fromiter(hashes, np.uint64, len(hashes))
        places = (hash_array >> np.uint64(64 - _INDEX_BITS)).astype(np.int64)
        rest = hash_array & np.uint64((1 << (64 - _INDEX_BITS)) - 1)
        # The number of leading zeros of the remaining 52 bits, plus one; exact, since 52 bits fit a float.
        ranks = (64 - _INDEX_BITS + 1) - np.frexp(rest.astype(np.float64))[1]
        np.maximum.at(self._registers, places, ranks.astype(np.uint8))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
