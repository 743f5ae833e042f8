"""Random conditions and rows that often match: small pools that include boundary values."""

from __future__ import annotations

import random
from typing import Any

from muster.predicates import ast, types

DOMAIN = ("docs", "cgi", "xml")
MODEL: dict[str, types.AttributeType] = {
    "s": types.STRING,
    "sender.s": types.STRING,
    "i": types.INT,
    "j": types.INT,
    "f": types.FLOAT,
    "g": types.FLOAT,
    "b": types.BOOL,
    "c": types.BOOL,
    "set": types.set_of(*DOMAIN),
}
NAMES = [ast.Name("s"), ast.Name("s", "sender"), *(ast.Name(key) for key in "ijfgbc"), ast.Name("set")]
MISSING = ast.Name("missing")

BIG = 2**53
INTS = [0, 1, -1, 2, 3, -7, 10, BIG, BIG + 1, -BIG - 1, 3_037_000_500, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [
    0.0,
    -0.0,
    0.5,
    1.0,
    -1.0,
    2.0,
    2.5,
    -7.0,
    1e-300,
    1e300,
    float(BIG),
    float(2**63),
    -float(2**63),
    1.5e19,
]
SPECIAL = [float("inf"), float("-inf"), float("nan")]
STRINGS = [
    "",
    "a",
    "ab",
    "aab",
    "abab",
    "it's",
    'say "x"',
    "a%b",
    "_",
    "\\",
    "a\\b",
    "é",
    "日本x",
    "a\nb",
    "!%",
    "A",
    "[*]?",
    "${spark.master}",
]
PATTERNS = [
    ("a%", ""), ("%b", ""), ("%a%", ""), ("a_", ""), ("_", ""), ("%", ""), ("%_%", ""), ("a%b", ""),
    ("%a%b%", ""), ("%\\%", ""), ("a!%b", "!"), ("!_", "!"), ("!!%", "!"), ("%__%", ""), ("it's", ""),
    ("", ""), ("%日_%", ""), ("a_b", ""), ("_a%_b", ""), ("%a%a%", ""), ("%*%", ""), ("[%", ""),
    ("%'%", ""), ("%a_b", ""), ("ab%ab", ""),
]  # fmt: skip
SIGNS: list[ast.ComparisonOperator] = ["=", "<>", "<", "<=", ">", ">="]


def value(declared: types.AttributeType, rng: random.Random) -> Any:
    if rng.random() < 0.2:
        return None
    match declared.kind:
        case types.ValueKind.STRING:
            return rng.choice(STRINGS)
        case types.ValueKind.INT:
            return rng.choice(INTS)
        case types.ValueKind.FLOAT:
            return rng.choice(FLOATS + SPECIAL)
        case types.ValueKind.BOOL:
            return rng.random() < 0.5
        case types.ValueKind.SET:
            return frozenset(word for word in DOMAIN if rng.random() < 0.5)


def row(rng: random.Random) -> dict[str, Any]:
    return {key: value(declared, rng) for key, declared in MODEL.items()}


def untyped_row(rng: random.Random) -> dict[str, Any]:
    """A message that keeps to no model."""
    kinds = list(MODEL.values())
    return {key: value(rng.choice(kinds), rng) for key in MODEL if rng.random() < 0.9}


def condition(rng: random.Random, depth: int = 4) -> ast.Condition:
    chance = rng.random()
    if depth == 0 or chance < 0.15:
        return clause(rng)
    if chance < 0.35:
        return ast.Not(condition(rng, depth - 1))
    parts = tuple(condition(rng, depth - 1) for _ in range(rng.choice([2, 2, 2, 3])))
    return ast.And(parts) if chance < 0.68 else ast.Or(parts)


def clause(rng: random.Random) -> ast.Clause:
    left: ast.Expression
    right: ast.Expression
    chance = rng.random()
    if chance < 0.02:
        return ast.Constant(rng.random() < 0.5)
    if chance < 0.1:
        return ast.IsNull(_name(rng))
    if chance < 0.2:
        return ast.In(_name(rng, "s"), tuple(rng.sample(STRINGS, rng.choice([1, 2, 8]))))
    if chance < 0.32:
        return ast.Like(_name(rng, "s"), *rng.choice(PATTERNS))
    if chance < 0.4:
        return ast.Contains(_name(rng, "set"), rng.choice([*DOMAIN, "other"]))
    if chance < 0.5:
        left, right = _name(rng), _name(rng)
    elif chance < 0.58:
        left, right = _name(rng), _literal(rng)
    elif chance < 0.64:
        left, right = ast.Name(rng.choice("bc")), ast.Literal(rng.random() < 0.5)
    elif chance < 0.72:
        left, right = _name(rng, "s"), ast.Literal(rng.choice(STRINGS))
    elif chance < 0.85:
        left, right = ast.Name(rng.choice("ijfg")), _number(rng)
    else:
        return ast.Comparison(rng.choice(SIGNS), arithmetic(rng, 2), arithmetic(rng, rng.choice([0, 0, 1])))
    sign = rng.choice(SIGNS if _ordered(left) and _ordered(right) else SIGNS[:2])
    return ast.Comparison(sign, *((left, right) if rng.random() < 0.7 else (right, left)))


def _ordered(side: ast.Expression) -> bool:
    return not isinstance(side, ast.Literal) or side.kind.is_number


def arithmetic(rng: random.Random, depth: int) -> ast.Expression:
    chance = rng.random()
    if depth == 0 or chance < 0.2:
        return _number(rng) if rng.random() < 0.4 else ast.Name(rng.choice("ijfgijfgb"))
    if chance < 0.35:
        return ast.Unary(rng.choice(["-", "-", "+"]), arithmetic(rng, depth - 1))
    return ast.Arithmetic(
        rng.choice(["+", "-", "*", "/"]), arithmetic(rng, depth - 1), arithmetic(rng, depth - 1)
    )


def _name(rng: random.Random, usual: str = "") -> ast.Name:
    if usual == "s" and rng.random() < 0.85:
        return rng.choice(NAMES[:2])
    if usual == "set" and rng.random() < 0.85:
        return NAMES[-1]
    return MISSING if rng.random() < 0.05 else rng.choice(NAMES)


def _number(rng: random.Random) -> ast.Literal:
    return ast.Literal(rng.choice(INTS) if rng.random() < 0.6 else rng.choice(FLOATS))


def _literal(rng: random.Random) -> ast.Literal:
    return rng.choice([_number(rng), ast.Literal(rng.choice(STRINGS)), ast.Literal(rng.random() < 0.5)])
