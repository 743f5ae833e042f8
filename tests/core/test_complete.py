"""Typed values for output: every field is present, whatever the wire format omits."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from muster.core.formats import complete


class _Colour(enum.StrEnum):
    RED = "red"


class _Inner(msgspec.Struct, array_like=True, omit_defaults=True):
    a: int = 0
    b: str = ""


class _Outer(msgspec.Struct, omit_defaults=True, tag_field="kind", tag="outer/1"):
    inner: _Inner = msgspec.field(default_factory=_Inner)
    many: tuple[_Inner, ...] = ()
    by_name: dict[str, _Inner] = {}
    colour: _Colour = _Colour.RED
    ratio: float = float("nan")
    path: Path = Path("a/b")
    camel_case: int = msgspec.field(default=1, name="camelCase")


def test_fields_at_their_default_are_present():
    assert complete.builtins(_Outer()) == {
        "kind": "outer/1",
        "inner": {"a": 0, "b": ""},
        "many": [],
        "by_name": {},
        "colour": "red",
        "ratio": None,
        "path": "a/b",
        "camelCase": 1,
    }


def test_plain_values_stay_and_structures_are_visited():
    value = {"rows": [_Inner(1, "x")], 2: (None, True, 1.5)}
    assert complete.builtins(value) == {"rows": [{"a": 1, "b": "x"}], "2": [None, True, 1.5]}
