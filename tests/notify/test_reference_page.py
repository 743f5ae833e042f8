"""The documented formats and limits are those of the code."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from muster.core import subjects
from muster.notify import models, protocol

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "notify.md").read_text()


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        (protocol.DefineModel, set()),
        (protocol.AppliedChanges, {"snapshot"}),
        (protocol.ShardLogEntry, set()),
        (protocol.JoinReceiver, set()),
        (protocol.JoinReceivers, set()),
        (protocol.ScopedAttributes, set()),
        (protocol.UpdateReceivers, set()),
        (protocol.DecisionRecord, set()),
        (protocol.AdmittedEvent, set()),
    ],
)
def test_every_field_of_the_history_is_documented(kind, left_out):
    fields = {field.name for field in msgspec.structs.fields(kind)} - left_out
    assert {name for name in fields if f"`{name}`" not in PAGE} == set()


def test_subjects_streams_and_kinds_are_as_documented():
    for what in ("model", "change", "decision"):
        assert subjects.log_subject(protocol.PART, "history", what) in PAGE
    for kind in (protocol.DefineModel, protocol.AppliedChanges, protocol.DecisionRecord):
        assert str(kind.__struct_config__.tag) in PAGE
    assert f"`{protocol.STREAM_HISTORY}`" in PAGE
    assert models.RestrictedAttributeClaimed.code in PAGE


def test_limits_are_as_documented():
    bounds = models.POLICY_LIMITS
    words = " ".join(PAGE.split())
    assert f"{bounds.text_length:,} characters, {bounds.clauses} clauses, {bounds.depth} levels" in words
    assert f"pattern {bounds.pattern_length} characters" in words
    assert f"more than {models.CONJUNCTIONS_MAX} conjunctions" in words
    assert f"at most {models.ATTRIBUTES_MAX} attributes" in words
