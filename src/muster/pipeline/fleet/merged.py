"""Closed windows on their way from the shards to the driver: divided by the names of groups, and merged.

A shard has a share of every group that one of its machines belongs to.  `divided` gives each share to the
part of its name, so that whoever has one part of all shards can add up its groups and zones (`merge`)
without the others.  What the driver then gets of a group does not depend on its machines: the figures that
rules need, the report that is published, and no histograms or rankings.  Only the system is the sum of all
groups: each part sends its share of it, a single cell.

Nothing here reads a clock or the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from muster.core import errors, messages
from muster.pipeline.fleet import cell_arrays, cells, rollups, shards, state
from muster.pipeline.history import data_files


class MergedWindow(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Groups or zones of one window: the sums of all shards, without histograms and rankings."""

    scope: str
    from_ms: int
    width_ms: int
    names: list[str]
    known: list[int]
    stale: list[int]
    gone: list[bool]
    cells: list[Any]  # packed: a row for each name
    figures: tuple[int, str, bytes]  # packed: as of `cells.CellTable.figures`
    reports: list[bytes]  # encoded; empty if too large to publish, or gone


class MergedPart(msgspec.Struct, array_like=True):
    """The groups and zones of one part."""

    windows: list[MergedWindow] = msgspec.field(default_factory=list)
    system: list[state.ClosedWindow] = msgspec.field(default_factory=list)  # shares of it
    files: list[data_files.DataFile] = msgspec.field(default_factory=list)  # of `groups`, not committed
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    faults: dict[str, str] = msgspec.field(default_factory=dict)  # of a user's steps

    def totals(self) -> list[rollups.ScopeTotals]:
        """Its groups and zones, for rules and lists: their cells have no histograms."""
        listed = []
        for window in self.windows:
            table = cells.CellTable.unpack(window.cells)
            figures = cell_arrays.unpacked(window.figures, np.float64)
            table.set_figures(figures.reshape(len(table), len(cells.FIGURES), len(cells.METRICS)))
            listed += [
                rollups.ScopeTotals(
                    window.scope,
                    name,
                    window.from_ms,
                    window.width_ms,
                    cells.WindowCell(table, row),
                    known,
                    stale,
                    gone,
                )
                for row, (name, known, stale, gone) in enumerate(
                    zip(window.names, window.known, window.stale, window.gone, strict=True)
                )
            ]
        return listed

    def reports(self) -> Iterator[tuple[str, str, int, bytes]]:
        """Scope, name, end of the window and message of all that are not gone."""
        for window in self.windows:
            to_ms = window.from_ms + window.width_ms
            for name, gone, data in zip(window.names, window.gone, window.reports, strict=True):
                if not gone:
                    yield window.scope, name, to_ms, data


def divided(closed: Iterable[state.ClosedWindow], parts: int) -> Iterator[tuple[int, state.ClosedWindow]]:
    """The share of each part in closed windows of a shard. Zones, of which there are few, are not divided:
    the first part has them, and empty windows."""
    for window in closed:
        if parts == 1 or not window.names or window.scope == "zone":
            yield 0, window
            continue
        part = shards.shards_of(pa.array(window.names, pa.string()), parts)
        table = window.table()
        names, known, stale = (
            np.array(values, object) for values in (window.names, window.known, window.stale)
        )
        for number in np.unique(part).tolist():
            rows = np.flatnonzero(part == number)
            yield (
                number,
                msgspec.structs.replace(
                    window,
                    names=names[rows].tolist(),
                    known=known[rows].tolist(),
                    stale=stale[rows].tolist(),
                    cells=table.select(rows),
                ),
            )


def joined(closed: Sequence[state.ClosedWindow], top: int) -> list[state.ClosedWindow]:
    """The windows of several shards as those of one."""
    shares: dict[tuple[str, int, int, bool], list[state.ClosedWindow]] = {}
    for share in closed:
        shares.setdefault((share.scope, share.from_ms, share.width_ms, share.gone), []).append(share)
    windows = []
    for window, *others in shares.values():
        if others:
            names, table, figures = rollups.added_up([window, *others])
            table.compact(top)
            table.name_machines()
            known, stale, _ = figures.tolist()
            window = msgspec.structs.replace(window, names=list(names), known=known, stale=stale, cells=table)
        windows.append(window)
    return windows


def merge(closed: Iterable[state.ClosedWindow], top: int) -> tuple[list[rollups.ScopeTotals], MergedPart]:
    """Add up one part of the windows of all shards: the totals of groups and zones, and the part without what
    `described` adds."""
    groups, part = [], MergedPart()
    for many in rollups.scope_totals(closed, top):
        if many.scope in state.SCOPES:
            groups.append(many)
        else:
            part.system.append(
                state.ClosedWindow(
                    scope=many.scope,
                    from_ms=many.from_ms,
                    width_ms=many.width_ms,
                    names=[many.name],
                    known=[many.known],
                    stale=[many.stale],
                    cells=many.cell.table.pack(),
                )
            )
    return groups, part


def described(totals: Sequence[rollups.ScopeTotals]) -> list[MergedWindow]:
    """In short, with the reports to be published. ``totals``: all of a part, in the order of `merge`."""
    windows = []
    for table, positions, rows in rollups.by_table(totals):
        members = [totals[position] for position in positions.tolist()]
        if len(rows) != len(table) or (np.diff(rows) < 0).any():
            order = np.argsort(rows)
            members, rows = [members[place] for place in order.tolist()], rows[order]
            table = table.select(rows)
        first = members[0]
        windows.append(
            MergedWindow(
                scope=first.scope,
                from_ms=first.from_ms,
                width_ms=first.width_ms,
                names=[many.name for many in members],
                known=[many.known for many in members],
                stale=[many.stale for many in members],
                gone=[many.gone for many in members],
                cells=table.in_short().pack(),
                figures=cell_arrays.packed(table.figures()),
                reports=_encoded(members),
            )
        )
    return windows


def _encoded(members: list[rollups.ScopeTotals]) -> list[bytes]:
    reported = [many for many in members if not many.gone]
    encoded = dict(zip(map(id, reported), rollups.encoded_reports(reported), strict=True))
    return [_publishable(many, encoded.get(id(many), b"")) for many in members]


def _publishable(many: rollups.ScopeTotals, data: bytes) -> bytes:
    if len(data) <= messages.MAX_BYTES:
        return data
    try:
        return messages.encode(rollups.group_report(many))
    except errors.LimitExceeded:
        return b""
