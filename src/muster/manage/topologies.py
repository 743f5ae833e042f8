"""Networks of brokers as resources: ring, chain, star, tree, and the clusters of the paper. Pure.

A topology expands into a resource of the type ``broker`` for each broker. A link is a leaf link from the near
broker to the far one. The near broker depends on the far one; brokers that do not depend on each other start
at the same time.

Leaf links must not form a loop, because messages would circulate forever. A ring is therefore a chain whose
last link is a reserve that is closed when another link fails. The first broker has the reserve, because a
broker does not forward messages between two links that it initiated itself: each broker initiates at most
one, whichever link is down.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from muster.core import errors
from muster.core.settings import sections
from muster.manage import protocol

doc = sections.field_doc

SIZE_MAX = 64
SUPER_CLUSTER = 2  # clusters in a super-cluster
CLUSTER = 3  # brokers in a cluster's chain


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network of brokers, named NAME-1, NAME-2, …, in the group NAME."""

    name: Annotated[str, doc("Its name.", pattern=r"^[A-Za-z0-9_-]{1,100}$(?!\n)")]
    shape: Annotated[
        Literal["ring", "chain", "star", "tree", "cluster"],
        doc("ring: a chain with a reserve link; cluster: chains of three whose heads are linked."),
    ]
    size: Annotated[int, doc("Number of brokers.", ge=1, le=SIZE_MAX)]
    agent: Annotated[str, doc("The agent that hosts the brokers.", pattern=r"^[A-Za-z0-9_-]{1,128}$(?!\n)")]
    fan_out: Annotated[int, doc("Of a tree: brokers below each broker.", ge=1, le=SIZE_MAX)] = 3
    storage: Annotated[bool, doc("Whether the brokers store streams.")] = False


def links(topology: Topology) -> list[tuple[int, int]]:
    """Pairs (near, far) of brokers, counted from 0; the far one always has the lower number."""
    size = topology.size
    match topology.shape:
        case "ring" | "chain":
            return [(number, number - 1) for number in range(1, size)]
        case "star":
            return [(number, 0) for number in range(1, size)]
        case "tree":
            return [(number, (number - 1) // topology.fan_out) for number in range(1, size)]
        case "cluster":
            return _clustered(size)


def _clustered(size: int) -> list[tuple[int, int]]:
    """Chains of three; the heads of two chains are linked as a super-cluster, and so on with their heads.

    With 8 brokers: chains of 3, 3 and 2 (5 links), one link within the first pair, one to the second: 7.
    """
    heads = list(range(0, size, CLUSTER))
    pairs = [(number, number - 1) for number in range(1, size) if number not in heads]
    while len(heads) > 1:
        for first in range(0, len(heads), SUPER_CLUSTER):
            pairs += [(other, heads[first]) for other in heads[first + 1 : first + SUPER_CLUSTER]]
        heads = heads[::SUPER_CLUSTER]
    return sorted(pairs)


def reserve(topology: Topology) -> tuple[int, int] | None:
    """The reserve link of a ring, which stays open until another link fails."""
    return (0, topology.size - 1) if topology.shape == "ring" and topology.size > 2 else None


def broker_name(topology: Topology, number: int) -> str:
    return f"{topology.name}-{number + 1}"


def expand(topology: Topology) -> list[dict[str, Any]]:
    """The manifest entries of this network."""
    if topology.shape == "ring" and topology.size == 2:
        raise errors.InvalidInput("a ring has one broker, or at least three")
    names = [broker_name(topology, number) for number in range(topology.size)]
    far_ends: dict[int, list[str]] = {}
    for near, far in links(topology):
        far_ends.setdefault(near, []).append(names[far])
    spare = reserve(topology)
    entries = []
    for number, name in enumerate(names):
        config: dict[str, Any] = {"storage": topology.storage, "links": far_ends.get(number, [])}
        if spare is not None and spare[0] == number:
            config["reserve"] = names[spare[1]]
            config["ring"] = names
        entries.append(
            {
                "name": name,
                "type": "broker",
                "agent": topology.agent,
                "group": topology.name,
                "labels": {protocol.TOPOLOGY: topology.name, "shape": topology.shape},
                "depends_on": far_ends.get(number, []),
                "config": config,
            }
        )
    return entries
