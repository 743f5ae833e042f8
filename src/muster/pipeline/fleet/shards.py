"""The shards of the fleet's state: which one a machine belongs to, and division into another number. Pure.

`split` divides a shard by the hash of its machines, `merge` joins the parts of several shards.  Machines and
their rankings go to their own new shard.  Cells of open windows cannot be divided by machine: they go to one
of the new shards, because the cells of all shards are added up anyway.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core import duplicates
from muster.pipeline.fleet import cells, node_columns, state

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


def split(fleet: state.FleetState, shards: int, *, cells_to: int = 0) -> dict[int, state.FleetState]:
    """The parts of a shard by new shard; ``cells_to`` receives the cells of open windows."""
    shard = shards_of(fleet.nodes.names.array, shards)
    parts = {}
    for number in sorted({cells_to, *shard.tolist()}):
        part = _select(fleet, shard == number)
        if number == cells_to:
            part.populated = {scope: set(names) for scope, names in fleet.populated.items()}
        else:
            part.open_cells = {key: table.ranks_only() for key, table in part.open_cells.items()}
        parts[number] = part
    return parts


def merge(first: state.FleetState, other: state.FleetState) -> state.FleetState:
    """Join two parts with different machines and equal windows."""
    nodes, added = first.nodes, other.nodes
    merged = state.FleetState(first.plan)
    codes = {}
    words = {}
    for scope, names in (("group", added.groups), ("zone", added.zones)):
        words[scope] = dict(nodes.groups if scope == "group" else nodes.zones)
        codes[scope] = np.array(
            [words[scope].setdefault(name, len(words[scope])) for name in names], np.int64
        )
    data = {
        name: np.concatenate([column, codes[name][added.data[name]] if name in codes else added.data[name]])
        for name, column in nodes.data.items()
    }
    data = {name: column.astype(nodes.data[name].dtype) for name, column in data.items()}
    machines = node_columns.NodeNames.from_array(pa.concat_arrays([nodes.names.array, added.names.array]))
    merged.nodes = node_columns.NodeColumns(nodes.schema, machines, data, words["group"], words["zone"])
    merged.clock_ms = max(first.clock_ms, other.clock_ms)
    merged.closed_ms = max(first.closed_ms, other.closed_ms)
    merged.resumed_ms = max(first.resumed_ms, other.resumed_ms)
    merged.grid = first.grid
    merged.open_cells = dict(first.open_cells)
    moved = np.arange(len(nodes), len(machines))
    for key, table in other.open_cells.items():
        table.renumber_machines(moved)
        target = merged.open_cells.setdefault(key, cells.CellTable())
        target.grow(len(words[key[1]]))
        target.add(table, codes[key[1]][: len(table)])
    merged.populated = {scope: first.populated[scope] | other.populated[scope] for scope in state.SCOPES}
    merged.seen_messages = duplicates.DuplicateWindows.union(
        state.CHANNELS_MAX, first.seen_messages, other.seen_messages
    )
    return merged


def _select(fleet: state.FleetState, kept: node_columns.Bools) -> state.FleetState:
    """The shard with only these machines, and all of its cells."""
    part = state.FleetState(fleet.plan)
    nodes = fleet.nodes
    part.nodes = node_columns.NodeColumns(
        nodes.schema, nodes.names, dict(nodes.data), dict(nodes.groups), dict(nodes.zones)
    )
    moved = part.nodes.keep(kept)
    part.clock_ms, part.closed_ms, part.resumed_ms = fleet.clock_ms, fleet.closed_ms, fleet.resumed_ms
    part.grid = fleet.grid
    part.seen_messages = fleet.seen_messages
    for key, table in fleet.open_cells.items():
        copy = cells.CellTable.unpack(table.pack())
        copy.renumber_machines(moved)
        part.open_cells[key] = copy
    part.populated = {
        scope: set(np.array(list(names), object)[np.unique(column)].tolist())
        for scope, names, column in (
            ("group", nodes.groups, part.nodes.data["group"]),
            ("zone", nodes.zones, part.nodes.data["zone"]),
        )
    }
    return part
