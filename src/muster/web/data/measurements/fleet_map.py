"""The map of all machines: one value of each, ordered by zone and group, in a few bytes. Pure."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.core.reports import columns
from muster.web.data.measurements import charts, recent_reports

NO_VALUE = 255
STEPS = 254  # of the colour scale


class MapBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of a group in a zone, which follow each other."""

    zone: str
    group: str
    count: int


class FleetMap(msgspec.Struct, frozen=True, kw_only=True):
    """One byte of each machine, in the order of the blocks, in base64: the index of its state in ``states``,
    or its value from ``low`` (0) to ``high`` (254); 255 if it has none. ``names``: of the machines, one in a
    line; null if the layout is the client's.
    """

    layout: str
    machines: int = 0
    blocks: list[MapBlock] | None = None
    names: str | None = None
    metric: str = ""
    unit: str = ""
    metrics: list[str] = []
    states: list[str] = []
    low: float = 0.0
    high: float = 1.0
    values: str = ""


class MapLayout:
    """The order of the machines of a table."""

    def __init__(self, table: pa.Table) -> None:
        self.order = pc.sort_indices(
            table, sort_keys=[("zone", "ascending"), ("group", "ascending"), ("machine", "ascending")]
        )
        ordered = table.select(["zone", "group", "machine"]).take(self.order).combine_chunks()
        self.names = "\n".join(ordered.column("machine").to_pylist())
        counted = ordered.group_by(["zone", "group"], use_threads=False).aggregate([("machine", "count")])
        self.blocks = [
            MapBlock(zone=row["zone"], group=row["group"], count=row["machine_count"])
            for row in counted.to_pylist()
        ]
        digest = hashlib.blake2b(self.names.encode(), digest_size=8)
        digest.update(msgspec.json.encode(self.blocks))
        self.id = digest.hexdigest()


def layout_key(table: pa.Table) -> bytes:
    """Changes when the machines or their groups change. Computing it is cheap; the layout takes longer."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("machine", "group", "zone"):
        for chunk in table.column(name).chunks:
            for buffer in filter(None, chunk.buffers()):
                digest.update(buffer)
    return digest.digest()


def fleet_map(
    table: pa.Table, layout: MapLayout, states: Any, metric: str, client_layout: str, metrics: list[str]
) -> FleetMap:
    """``states``: of the machines, those without recent reports included."""
    known = client_layout == layout.id
    common = {
        "layout": layout.id,
        "machines": table.num_rows,
        "blocks": None if known else layout.blocks,
        "names": None if known else layout.names,
        "metric": metric,
        "metrics": metrics,
    }
    order = layout.order.to_numpy()
    if not metric:
        coded = pc.cast(states, pa.string()).combine_chunks().dictionary_encode()
        codes = np.minimum(coded.indices.to_numpy()[order], NO_VALUE).astype(np.uint8)
        return FleetMap(**common, states=coded.dictionary.to_pylist(), values=_text(codes))
    values = recent_reports.metric_values(table, metric)[order]
    values[pc.equal(states, "stale").to_numpy()[order]] = np.nan
    low, high = bounds(metric, values)
    with np.errstate(invalid="ignore"):
        scaled = np.rint(np.clip((values - low) / (high - low), 0, 1) * STEPS)
    codes = np.where(np.isnan(scaled), NO_VALUE, scaled).astype(np.uint8)
    return FleetMap(**common, low=low, high=high, unit=charts.unit(metric), values=_text(codes))


def bounds(metric: str, values: recent_reports.Floats) -> tuple[float, float]:
    """Of the colour scale. Percentages and shares have their own; others end at the 99th percentile."""
    if metric.endswith("_percent"):
        return 0.0, 100.0
    known = values[np.isfinite(values)]
    if not len(known) or (known.min() >= 0 and known.max() <= 1 and metric not in columns.STANDARD_METRICS):
        return 0.0, 1.0
    low, high = min(0.0, float(known.min())), float(np.percentile(known, 99))
    return low, high if high > low else low + 1.0


def _text(codes: Any) -> str:
    return base64.b64encode(codes.tobytes()).decode()
