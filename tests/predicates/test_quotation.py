"""Texts without quotes in predicates that select nothing."""

from __future__ import annotations

import pytest

from muster.predicates.analysis import quotation


@pytest.mark.parametrize("text", ["tier = front", "NOT tier <> front", "a > 1 AND (b = 2 OR tier == front)"])
def test_a_text_without_quotes_is_named(text: str):
    assert quotation.unquoted_hint(text) == "front is read as an attribute; write a text in quotes: 'front'"


@pytest.mark.parametrize("text", ["", "tier = 'front'", "load > limit", "front", "a = sender.b", "tier ="])
def test_other_predicates_have_no_hint(text: str):
    assert quotation.unquoted_hint(text) == ""
