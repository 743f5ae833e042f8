"""What would be right in place of a wrong field or value, from the types of a format. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_WRONG = re.compile(r"Invalid enum value (?:'([^']*)')?")
_NUMBER = re.compile(r"Expected `(?:int|float)\b[^`]*`, got `str`")
_PATTERN = "Expected `str` matching regex"
_TEXT = re.compile(r"Expected `str\b[^`]*`, got `(?:int|float|bool)`")
NAMED_MAX = 20


def split(message: str) -> tuple[str, list[str | int]]:
    """The problem and the path of an error of msgspec: ``Expected `int` … - at `$.resources[0].count```."""
    problem, _, where = message.partition(" - at `$")
    path: list[str | int] = [
        name or (int(index) if index.isdecimal() else "…") for name, index in _STEP.findall(where.rstrip("`"))
    ]
    if field := _UNKNOWN.search(problem):
        path.append(field[1])
    return problem, path


def hint(kind: Any, message: str) -> str | None:
    """For an error of msgspec about a value of this type: the nearest name, or all that there are; or how
    such a value is written."""
    problem, path = split(message)
    if unknown := _UNKNOWN.search(problem):
        return nearest(unknown[1], _names(_types(kind, path[:-1])))
    if wrong := _WRONG.search(problem):
        return nearest(wrong[1] or "", _values(_types(kind, path)))
    if problem.startswith(_PATTERN):
        return _description(kind, path)
    if _NUMBER.match(problem):
        return "a number without quotes and without a unit: the name of the field has the unit"
    if _TEXT.match(problem):
        return 'a text: write it in quotes, such as "8080"'
    return None


def nearest(word: str, names: Sequence[str]) -> str | None:
    if near := difflib.get_close_matches(word, names, 1):
        return f"did you mean {near[0]!r}?"
    more = ", …" if len(names) > NAMED_MAX else ""
    return f"there are {', '.join(names[:NAMED_MAX])}{more}" if names else None


def _description(kind: Any, path: Sequence[str | int]) -> str | None:
    for each in _types(kind, path[:-1]):
        for field in each.fields if isinstance(each, inspect.StructType) else ():
            if field.encode_name == path[-1] and isinstance(field.type, inspect.Metadata):
                return (field.type.extra_json_schema or {}).get("description")
    return None


def _types(kind: Any, path: Iterable[str | int]) -> list[inspect.Type]:
    """The types that are possible at a path."""
    types = _plain(inspect.type_info(kind))
    for step in path:
        types = [inner for each in types for inner in _inside(each, step)]
    return types


def _plain(info: inspect.Type) -> list[inspect.Type]:
    if isinstance(info, inspect.Metadata):
        return _plain(info.type)
    if isinstance(info, inspect.UnionType):
        return [inner for each in info.types for inner in _plain(each)]
    return [info]


def _inside(info: inspect.Type, step: str | int) -> list[inspect.Type]:
    if isinstance(info, inspect.StructType):
        return [inner for each in info.fields if each.encode_name == step for inner in _plain(each.type)]
    if isinstance(info, inspect.DictType):
        return _plain(info.value_type)
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        return _plain(info.item_type)
    return []


def _names(types: Iterable[inspect.Type]) -> list[str]:
    return [
        field.encode_name for each in types if isinstance(each, inspect.StructType) for field in each.fields
    ]


def _values(types: Iterable[inspect.Type]) -> list[str]:
    values: list[Any] = []
    for each in types:
        if isinstance(each, inspect.LiteralType):
            values += each.values
        elif isinstance(each, inspect.EnumType):
            values += [member.value for member in each.cls]
    return [str(value) for value in values]
