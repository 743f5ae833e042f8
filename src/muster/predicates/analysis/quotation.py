"""Texts without their quotes: `tier = front` compares two attributes, and usually selects nothing."""

from __future__ import annotations

from muster.core import errors
from muster.predicates import ast
from muster.predicates.syntax import parser


def unquoted_hint(text: str) -> str:
    """The likely mistake in a predicate that selects nothing; empty if it compares no two attributes."""
    try:
        condition = parser.parse(text)
    except errors.MusterError:
        return ""
    for node in ast.walk(condition):
        match node:
            case ast.Comparison(operator="=" | "<>", left=ast.Name(), right=ast.Name(name=word, scope="")):
                return f"{word} is read as an attribute; write a text in quotes: '{word}'"
            case _:
                pass
    return ""
