"""The simplest matcher: evaluates every receiver in turn.

It is the specification of delivery; tests and benchmarks compare the matcher with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.predicates import ast, types
from muster.predicates.backends import python


@dataclass(frozen=True, slots=True)
class ReferenceReceiver:
    name: str
    state: Mapping[str, types.Value]
    policy: python.Matches


def match(
    receivers: Iterable[ReferenceReceiver], attributes: Mapping[str, types.Value], address: python.Matches
) -> list[str]:
    """Return the receivers whose state matches the address and whose policy accepts event and sender."""
    return [
        receiver.name
        for receiver in receivers
        if address(receiver.state.get) and receiver.policy(attributes.get)
    ]


class ReferenceMatcher:
    """A set of receivers with the interface of the matcher, for tests and for comparison."""

    def __init__(self) -> None:
        self._receivers: dict[str, ReferenceReceiver] = {}

    def join(self, receiver: str, state: Mapping[str, types.Value], policy: ast.Condition | None) -> None:
        self._receivers[receiver] = ReferenceReceiver(receiver, dict(state), _compiled(policy))

    def update(self, receiver: str, values: Mapping[str, types.Value]) -> None:
        held = self._receivers[receiver]
        self._receivers[receiver] = ReferenceReceiver(receiver, {**held.state, **values}, held.policy)

    def set_policy(self, receiver: str, policy: ast.Condition | None) -> None:
        held = self._receivers[receiver]
        self._receivers[receiver] = ReferenceReceiver(receiver, held.state, _compiled(policy))

    def leave(self, receiver: str) -> None:
        del self._receivers[receiver]

    def match(self, attributes: Mapping[str, types.Value], address: ast.Condition) -> list[str]:
        return match(self._receivers.values(), attributes, python.compile(address))


def _compiled(policy: ast.Condition | None) -> python.Matches:
    return python.compile(ast.Constant(False) if policy is None else policy)
