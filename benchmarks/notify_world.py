"""The receivers, policies, addresses and events of ``bench-notify``, from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from muster.notify import models, protocol
from muster.notify.matcher import matcher
from muster.predicates import ast, types
from muster.predicates.syntax import printer

APPLICATIONS = tuple(f"app{number}" for number in range(64))
REGIONS = tuple(f"region{number}" for number in range(100))
SERVICES = ("docs", "cgi", "xml")
PROCESS = "farm"
KINDS = ("alert", "command", "notice", "report")
WEB_SERVER = models.Model(
    "WebServer",
    {
        "application": types.STRING,
        "region": types.STRING,
        "services": types.set_of(*SERVICES),
        "load": types.FLOAT,
    },
)

CONTROLLER = models.Model(
    "Controller", {"entity": types.STRING, "_command_region": types.STRING, "_trust_level": types.INT}
)
EVENTS = tuple(
    models.Model(kind, {"threat_level": types.INT, "cost": types.INT}, models.ModelKind.EVENT)
    for kind in KINDS
)


def _is(name: str, sign: ast.ComparisonOperator, value: Any, scope: str = "") -> ast.Condition:
    return ast.Comparison(sign, ast.Name(name, scope), ast.Literal(value))


def policy(dice: random.Random) -> ast.Condition:
    """One to three conjunctions of three to six clauses, of the kinds that the paper's policy has."""
    parts = []
    for _ in range(dice.randrange(1, 4)):
        clauses = [
            _is("threat_level", ">=", dice.randrange(1, 10)),
            _is("cost", "<", dice.randrange(1000)),
            _is("_command_region", "=", f"r{dice.randrange(20)}", "sender"),
            _is("_trust_level", ">=", dice.randrange(1, 6), "sender"),
            _is("entity", "=", f"e{dice.randrange(10)}", "sender"),
        ]
        chosen = dice.sample(clauses, dice.randrange(2, 6))
        parts.append(ast.And((_is(dice.choice(KINDS), "=", True), *chosen)))
    return parts[0] if len(parts) == 1 else ast.Or(tuple(parts))


def event(dice: random.Random, *, plenty: bool = False) -> dict[str, types.Value]:
    """``plenty``: one that many policies accept."""
    if plenty:
        return {**dict.fromkeys(KINDS, True), **event(dice), "threat_level": 9, "cost": 0}
    return {
        dice.choice(KINDS): True,
        "threat_level": dice.randrange(1, 10),
        "cost": dice.randrange(1000),
        "sender._command_region": f"r{dice.randrange(20)}",
        "sender._trust_level": dice.randrange(1, 6),
        "sender.entity": f"e{dice.randrange(10)}",
    }


def address(dice: random.Random, share: str, digits: int = 2) -> str:
    """Which part of the receivers it means, about; with many digits, no two are the same."""
    load = round(dice.uniform(0.2, 0.95), digits)
    match share:
        case "0.01%":
            return (
                f"region = '{dice.choice(REGIONS)}' AND application = '{dice.choice(APPLICATIONS)}' "
                f"AND services CONTAINS 'cgi' AND load < {load}"
            )
        case "1%":
            first, other = dice.sample(APPLICATIONS, 2)
            return f"application IN ('{first}', '{other}') AND services CONTAINS 'xml' AND load < {load}"
        case _:
            load = round(dice.uniform(0.6, 0.75), digits)
            return f"(services CONTAINS 'docs' OR services CONTAINS 'cgi') AND load < {load}"


def constants(meant: ast.Condition) -> str:
    """Those of an address of 1%, as SQL writes them."""
    matches = re.findall(r"'[^']*'|[\d.]+", printer.write(meant).replace("'xml'", ""))
    return ", ".join(matches)


def columns(numbers: np.random.Generator, count: int) -> dict[str, list[Any]]:
    """States; every fiftieth load is NULL."""
    sets = [frozenset(word for k, word in enumerate(SERVICES) if mask >> k & 1) for mask in range(8)]
    load = np.round(numbers.random(count), 4)
    load[::50] = np.nan
    return {
        "application": [APPLICATIONS[code] for code in numbers.integers(0, len(APPLICATIONS), count)],
        "region": [REGIONS[code] for code in numbers.integers(0, len(REGIONS), count)],
        "services": [sets[code] for code in numbers.integers(0, len(sets), count)],
        "load": [None if value != value else value for value in load.tolist()],
    }


def by_shard(numbers: Iterable[int]) -> dict[protocol.Shard, list[str]]:
    """The receivers of these numbers."""
    names_by_shard: dict[protocol.Shard, list[str]] = {shard: [] for shard in range(protocol.SHARDS)}
    for number in numbers:
        name = protocol.participant_id(PROCESS, f"web-{number}")
        names_by_shard[protocol.shard_of(name)].append(name)
    return names_by_shard


def build(receivers: int, policies: int, kernels: Any, *, scattered: bool = False) -> matcher.Matcher:
    """Receivers of one policy stand together, or ``scattered`` over chunks, as they come shard by shard."""
    dice, numbers = random.Random(policies), np.random.default_rng(receivers)
    listed = [models.canonical_text(policy(dice)) for _ in range(policies)]
    which = numbers.integers(0, policies, receivers)
    if not scattered:
        which.sort()
    made = matcher.Matcher(kernels=kernels)
    for chunk in np.array_split(np.arange(receivers), protocol.SHARDS):
        names = [protocol.participant_id(PROCESS, f"web-{number}") for number in chunk.tolist()]
        mine, local = np.unique(which[chunk], return_inverse=True)
        made.join_many(
            names, WEB_SERVER, columns(numbers, len(chunk)), [listed[index] for index in mine.tolist()], local
        )
    return made
