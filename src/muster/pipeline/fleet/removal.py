"""Removal of machines from the fleet by a user, before they are forgotten by themselves.

A removal is a message in the stream of reports, so it has a place among them: machines that reported later
are not removed.  Every shard applies it to its own machines.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import errors
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import node_columns, node_rules
from muster.predicates import ast
from muster.predicates.analysis import type_check
from muster.predicates.backends import columnar
from muster.predicates.syntax import parser

MACHINES_MAX = 10_000  # names in one removal

#: The attributes of machines that a predicate may use.
MODEL = {name: rules.MODELS["node"][name] for name in sorted(rules.ALWAYS_KNOWN)}


class MachineRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """Machines by name, or all for which a predicate is true."""

    machines: Annotated[tuple[str, ...], msgspec.Meta(max_length=MACHINES_MAX)] = ()
    where: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    at_ms: int = 0  # when the broker stored it

    def validate(self) -> None:
        """Raises `errors.InvalidInput` unless it selects by names or by a valid predicate."""
        if bool(self.machines) == bool(self.where):
            raise errors.InvalidInput("name machines or give a predicate, not both")
        if self.where:
            type_check.require(parser.parse(self.where), MODEL, self.where)

    def selects(self, known: node_columns.NodeColumns) -> node_columns.Bools:
        """The machines to be removed."""
        if not len(known):
            return np.zeros(0, np.bool_)
        if self.machines:
            selected = pc.is_in(known.names.array, value_set=pa.array(self.machines, pa.string())).to_numpy(
                False
            )
        else:
            condition = parser.parse(self.where)
            with_names = any(name.key == "machine" for name in ast.names(condition))
            selected = columnar.evaluate(
                condition, node_rules.known_facts(known, self.at_ms, with_names=with_names)
            )
        chosen: node_columns.Bools = np.asarray(selected) & (known.data["received_ms"] <= self.at_ms)
        return chosen
