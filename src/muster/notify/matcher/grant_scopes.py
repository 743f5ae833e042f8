"""Matching of events whose sender has grants that are limited to a region or an audience.

Such a grant counts only for the receivers in its scope.  The receivers that match the address are grouped by
the scopes that they are in, and the policies of each group are evaluated with the attributes that count
there.  Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.notify import authorities, protocol
from muster.notify.matcher import matcher, receiver_columns, receiver_table
from muster.predicates import ast, types

Array = npt.NDArray[Any]


def find(
    engine: matcher.Matcher, event: protocol.AdmittedEvent, address: ast.Condition
) -> list[matcher.MatchResult]:
    """Return the receivers of an event; valid until the next call of the matcher."""
    if not event.within:
        return engine.find(event.attribute_values(), address)
    results = []
    for addressed in engine.find_addressed(address):
        chosen = np.zeros(len(addressed.rows), np.bool_)
        inside = _inside(engine, addressed, event.within)
        packed = np.packbits(inside, axis=1)
        alike = packed.view(f"V{packed.shape[1]}").ravel()
        _, firsts, groups = np.unique(alike, return_index=True, return_inverse=True)
        for group, first in enumerate(firsts.tolist()):
            scopes = itertools.compress(event.within, inside[first])
            own = groups == group
            chosen[own] = engine.accepts(event.attribute_values(scopes), addressed.table, addressed.rows[own])
        results.append(matcher.MatchResult(addressed.table, addressed.rows[chosen]))
    return results


def attributes_seen_by(
    event: protocol.AdmittedEvent, receiver: str, state: dict[str, types.Value]
) -> dict[str, types.Value]:
    """Return the attributes with which the policy of one receiver is evaluated."""
    region = state.get(authorities.REGION)
    return event.attribute_values(
        scope
        for scope in event.within
        if (not scope.region or (isinstance(region, str) and _below(scope.region)(region)))
        and (not scope.audience or _named(receiver, scope.audience))
    )


def _inside(
    engine: matcher.Matcher, addressed: matcher.MatchResult, within: tuple[protocol.ScopedAttributes, ...]
) -> Array:
    """Return, for each row, the scopes that it is in."""
    table = engine.tables[addressed.table]
    inside = np.ones((len(addressed.rows), len(within)), np.bool_)
    names = engine.names([addressed]) if any(scope.audience for scope in within) else []
    for place, scope in enumerate(within):
        if scope.region:
            inside[:, place] &= _in_region(table, addressed.rows, scope.region)
        if scope.audience:
            audience = frozenset(scope.audience)
            inside[:, place] &= np.fromiter((_named(name, audience) for name in names), np.bool_, len(names))
    return inside


def _in_region(table: receiver_table.ReceiverTable, rows: Array, region: str) -> Array:
    column = table.columns.get(authorities.REGION)
    if not isinstance(column, receiver_columns.WordColumn) or column.kind is not types.ValueKind.STRING:
        return np.zeros(len(rows), np.bool_)
    return column.which(rows, _below(region))


def _below(region: str) -> Callable[[str], bool]:
    return lambda word: word == region or word.startswith((f"{region}/", f"{region}."))


def _named(receiver: str, audience: frozenset[str] | tuple[str, ...]) -> bool:
    return receiver in audience or receiver.partition("/")[0] in audience
