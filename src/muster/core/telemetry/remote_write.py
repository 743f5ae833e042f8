"""Metrics in the format of Prometheus remote write, version 1: protobuf, which the sender compresses. Pure.

WriteRequest: 1 timeseries*    TimeSeries: 1 labels*, 2 samples*
Label: 1 name, 2 value         Sample: 1 value (double), 2 timestamp (int64, milliseconds)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from muster.core.formats import snappy
from muster.core.telemetry import otlp

HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": "muster",
}


def encode(families: Iterable[otlp.MetricFamily], labels: Mapping[str, str], *, now_ms: int) -> bytes:
    """A WriteRequest with one sample for each series; ``labels`` are added to all."""
    out = bytearray()
    for family in families:
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            named = {**sample.labels, **labels, "__name__": sample.name}
            series = b"".join(
                _message(1, _message(1, name.encode()) + _message(2, named[name].encode()))
                for name in sorted(named)  # the order that the protocol requires
            )
            point = b"\x09" + struct.pack("<d", sample.value) + b"\x10" + snappy.varint(now_ms)
            out += _message(1, series + _message(2, point))
    return bytes(out)


def _message(field: int, data: bytes) -> bytes:
    return bytes((field << 3 | 2,)) + snappy.varint(len(data)) + data
