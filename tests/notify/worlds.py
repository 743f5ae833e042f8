"""Random receivers of different models that join, change and leave, and events to them."""

from __future__ import annotations

import random
from typing import Any

from muster.notify import models
from muster.notify.matcher import matcher
from muster.predicates import types
from muster.predicates.syntax import parser
from tests.notify import reference

MODELS = (
    models.Model(
        "A",
        {
            "s": types.STRING,
            "n": types.INT,
            "f": types.FLOAT,
            "b": types.BOOL,
            "t": types.set_of("x", "y", "z"),
            "ip": types.STRING,  # more words than a byte can count
        },
    ),
    # The same names with unlike types.
    models.Model(
        "B",
        {"s": types.INT, "f": types.STRING, "t": types.STRING, "q": types.FLOAT, "n": types.FLOAT},
    ),
)
WORDS = ("a", "b", "c", "north", "south")
STATE = ("s", "n", "f", "b", "t", "q", "ip", "g", "missing")
EVENT = ("alert", "level", "e", "sender._r", "sender.x", "word")
CELLS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    2,
    0.5,
    2.5,
    float("nan"),
    2**53,
    2**53 + 1,
    "a",
    "north",
    "elsewhere",
    frozenset("x"),
    frozenset(),
)
NUMBERS = ("0", "1", "2", "0.5", "2.5", "3", "9007199254740992", "9007199254740993", "1E300")


def value(dice: random.Random, name: str, declared: types.AttributeType) -> types.Value:
    if dice.random() < 0.15:
        return None
    match declared.kind:
        case types.ValueKind.STRING:
            return str(dice.randrange(400)) if name == "ip" else dice.choice(WORDS)
        case types.ValueKind.INT:
            return dice.choice([0, 1, 2, 3, 5, 2**53, 2**53 + 1, -(2**63), 2**63 - 1])
        case types.ValueKind.FLOAT:
            return dice.choice([0.0, 0.25, 0.5, 1.0, 2.0, 2.0**53, 1e300, float("inf"), -float("inf")])
        case types.ValueKind.BOOL:
            return dice.random() < 0.5
        case types.ValueKind.SET:
            return frozenset(word for word in declared.domain if dice.random() < 0.5)


def clause(dice: random.Random, names: tuple[str, ...]) -> str:
    name = dice.choice(names)
    sign = dice.choice(["<", "<=", ">", ">=", "=", "<>"])
    return dice.choice(
        [
            f"{name} = '{dice.choice(WORDS)}'",
            f"{name} <> '{dice.choice(WORDS)}'",
            f"{name} {sign} {dice.choice(NUMBERS)}",
            f"{name} {sign} {dice.random():.2f}",
            f"{name} {sign} {dice.uniform(-1, 3):.9f}",  # a constant that no other address has
            f"{name} IN ('a', 'north')",
            f"{name} LIKE '{dice.choice(['%o%', 'a', '_orth', '1%', '%'])}'",
            f"{name} IS NULL",
            f"{name} CONTAINS '{dice.choice('xyzw')}'",
            f"{name} = TRUE",
            f"{name} {sign} {dice.choice(names)} + 1",
        ]
    )


def expression(dice: random.Random, names: tuple[str, ...], depth: int = 3) -> str:
    if depth == 0 or dice.random() < 0.3:
        return clause(dice, names)
    if dice.random() < 0.33:
        return f"NOT ({expression(dice, names, depth - 1)})"
    join = dice.choice([" AND ", " OR "])
    parts = [expression(dice, names, depth - 1) for _ in range(dice.randrange(2, 4))]
    return f"({join.join(parts)})"


def play(dice: random.Random, kernels: Any, *, receivers: int = 150, steps: int = 120) -> tuple[int, int]:
    """Do the same to the engine and to the reference; returns how many events were sent and delivered."""
    ours, plainly = matcher.Matcher(kernels=kernels), reference.ReferenceMatcher()
    there: list[str] = []
    known = list(MODELS)
    policies = [parser.parse(expression(dice, EVENT)) for _ in range(20)]
    sent = delivered = 0
    for step in range(receivers + steps):
        if step == receivers + steps // 2:
            known = [models.Model(item.name, {**item.attributes, "g": types.STRING}) for item in known]
            for model in known:
                ours.define(model)
        action = dice.random()
        if step < receivers or action < 0.1:
            # Some come again before they have left, as another kind of receiver perhaps.
            receiver = dice.choice(there) if there and dice.random() < 0.1 else f"p{step}"
            model = dice.choice(known)
            state = {
                name: value(dice, name, declared)
                for name, declared in model.attributes.items()
                if dice.random() < 0.9
            }
            own = (
                parser.parse(expression(dice, EVENT))
                if dice.random() < 0.2
                else dice.choice([*policies, None])
            )
            ours.join(receiver, model, state, own)
            plainly.join(receiver, state, own)
            there += [receiver] if receiver not in there else []
        elif action < 0.3:
            receiver = dice.choice(there)
            name, declared = dice.choice(list(ours.model_of(receiver).attributes.items()))
            cell = value(dice, name, declared)
            ours.update([receiver], {name: [cell]})
            plainly.update(receiver, {name: cell})
        elif action < 0.4:
            receiver, own = dice.choice(there), dice.choice([*policies, None])
            ours.set_policy(receiver, own)
            plainly.set_policy(receiver, own)
        elif action < 0.5:
            receiver = there.pop(dice.randrange(len(there)))
            ours.leave(receiver)
            plainly.leave(receiver)
        else:
            attributes = {name: dice.choice(CELLS) for name in EVENT if dice.random() < 0.8}
            address = parser.parse(expression(dice, STATE))
            match = sorted(plainly.match(attributes, address))
            assert sorted(ours.match(attributes, address)) == match, (step, attributes, address)
            sent += 1
            delivered += len(match)
    return sent, delivered
