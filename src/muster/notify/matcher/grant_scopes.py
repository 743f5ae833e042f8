"""Who gets an event whose sender is not believed alike by all: a grant may hold in a region only.

It may also hold for an audience, which is those that it names.

Those that the address means are sorted by the scopes they are in, and the policies of each group are asked
about what that group believes.  Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.notify import authorities, protocol
from muster.notify.matcher import matcher as engines
from muster.notify.matcher import receiver_columns
from muster.notify.matcher import receiver_table as tables
from muster.predicates import ast, types

Array = npt.NDArray[Any]


def find(
    engine: engines.Matcher, event: protocol.AdmittedEvent, address: ast.Condition
) -> list[engines.MatchResult]:
    """The receivers of an event; good until the engine is asked again."""
    if not event.within:
        return engine.find(event.believed(), address)
    results = []
    for meant in engine.find_meant(address):
        chosen = np.zeros(len(meant.rows), np.bool_)
        inside = _inside(engine, meant, event.within)
        packed = np.packbits(inside, axis=1)
        alike = packed.view(f"V{packed.shape[1]}").ravel()
        _, firsts, groups = np.unique(alike, return_index=True, return_inverse=True)
        for group, first in enumerate(firsts.tolist()):
            scopes = itertools.compress(event.within, inside[first])
            own = groups == group
            chosen[own] = engine.accepts(event.believed(scopes), meant.table, meant.rows[own])
        results.append(engines.MatchResult(meant.table, meant.rows[chosen]))
    return results


def attributes_seen_by(
    event: protocol.AdmittedEvent, receiver: str, state: dict[str, types.Value]
) -> dict[str, types.Value]:
    """What one receiver is asked about."""
    region = state.get(authorities.REGION)
    return event.believed(
        scope
        for scope in event.within
        if (not scope.region or (isinstance(region, str) and _below(scope.region)(region)))
        and (not scope.audience or _named(receiver, scope.audience))
    )


def _inside(
    engine: engines.Matcher, meant: engines.MatchResult, within: tuple[protocol.ScopedAttributes, ...]
) -> Array:
    """For each row, which scopes it is in."""
    table = engine.tables[meant.table]
    inside = np.ones((len(meant.rows), len(within)), np.bool_)
    names = engine.names([meant]) if any(scope.audience for scope in within) else []
    for place, scope in enumerate(within):
        if scope.region:
            inside[:, place] &= _in_region(table, meant.rows, scope.region)
        if scope.audience:
            audience = frozenset(scope.audience)
            inside[:, place] &= np.fromiter((_named(name, audience) for name in names), np.bool_, len(names))
    return inside


def _in_region(table: tables.ReceiverTable, rows: Array, region: str) -> Array:
    column = table.columns.get(authorities.REGION)
    if not isinstance(column, receiver_columns.WordColumn) or column.kind is not types.ValueKind.STRING:
        return np.zeros(len(rows), np.bool_)
    return column.which(rows, _below(region))


def _below(region: str) -> Callable[[str], bool]:
    return lambda word: word == region or word.startswith((f"{region}/", f"{region}."))


def _named(receiver: str, audience: frozenset[str] | tuple[str, ...]) -> bool:
    return receiver in audience or receiver.partition("/")[0] in audience
