"""NAME=VALUE arguments."""

from __future__ import annotations

import click
import pytest

from muster.cli import command, registry_calls
from muster.cli.contexts import common
from muster.cli.messages import common as messages_common


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1.5", 1.5),
        ("-0.25", -0.25),
        ("1.10", "1.10"),  # a version: as a number it would lose a digit
        ("1e3", "1e3"),
        ("NaN", "NaN"),
        ('"1.0"', "1.0"),
        ("true", True),
        ("[1, 1.10]", [1, "1.10"]),
        ("word", "word"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_a_value_is_json_or_text(text, value):
    assert command.parse_value(text) == value
    assert registry_calls.key_values((f"name={text}",)) == {"name": value}
    assert common.parse_assignments((f"name={text}",), "--attribute") == {"name": value}


def test_a_property_of_a_message_is_a_number_a_truth_value_or_text():
    texts = ("a=1", "b=1.5", "c=true", "version=1.10", "id=007", "n=1_000", "x=nan", "empty=", "list=[1]")
    values = {"version": "1.10", "id": "007", "n": "1_000", "x": "nan", "empty": "", "list": "[1]"}
    assert messages_common.properties_of(texts) == {"a": 1, "b": 1.5, "c": True, **values}


def test_a_name_is_given_once_and_has_a_value():
    with pytest.raises(click.BadParameter, match="'a' is given twice"):
        registry_calls.key_values(("a=1", "b=2", "a=3"))
    for text in ("a", "=1"):
        with pytest.raises(click.BadParameter, match="is not NAME=VALUE"):
            common.parse_assignments((text,), "--attribute")
