"""A resource as XML and back, whatever its configuration holds."""

from __future__ import annotations

import contextlib
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.formats import xml
from muster.gateways.wsman.wire import faults, namespaces, representations
from muster.manage import protocol, rows

texts = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=12
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**62), 2**62),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=5), inner),
    ),
    max_leaves=8,
)
configs = st.dictionaries(st.text(string.ascii_letters + "_-.", min_size=1, max_size=8), values, max_size=4)


def described(**spec: Any) -> rows.ResourceDescription:
    return rows.ResourceDescription(
        name="a",
        type="process",
        agent="host-a",
        group="web",
        desired="up",
        state="up",
        since_ms=1,
        epoch=1,
        generation=7,
        applied=True,
        applied_by="ann",
        spec=msgspec.convert(
            {"name": "a", "type": "process", "agent": "host-a", **spec}, protocol.ResourceSpec
        ),
    )


@settings(max_examples=150, deadline=None)
@given(configs, st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=5), texts, max_size=3))
def test_what_was_got_and_is_put_back_changes_nothing(config, labels):
    resource = described(config=config, labels=labels, depends_on=["db"], restart={"attempts": 3})
    sent = xml.parse(xml.write(representations.resource(resource), namespaces.PREFIXES))
    entry, generation = representations.entry(sent)
    assert entry["config"] == config
    assert entry["labels"] == labels
    assert generation == 7
    assert representations.changes(resource, entry) == {}
    assert representations.changes(resource, {**entry, "config": {**config, "new": 1}}) == {
        "config": {**config, "new": 1}
    }


def test_what_a_put_leaves_out():
    resource = described(config={"x": 1}, labels={"a": "b"}, depends_on=["db"], restart={"attempts": 3})
    assert representations.changes(resource, {"name": "a"}) == {"labels": {}, "depends_on": [], "config": {}}


@settings(max_examples=100, deadline=None)
@given(st.recursive(
    st.builds(lambda kind, text: f'<i Name="n" Type="{kind}">{text}</i>',
              st.sampled_from(["string", "integer", "number", "boolean", "null", "list", "map", "x"]),
              st.sampled_from(["", "1", "true", "1e999", "NaN", "-", "99999999999999999999", "{}"])),
    lambda inner: st.lists(inner, max_size=3).map(lambda actual: f'<i Type="map">{"".join(actual)}</i>'),
    max_leaves=6,
))  # fmt: skip
def test_any_item_is_read_or_refused(text):
    with contextlib.suppress(faults.Fault):
        representations.value(xml.parse(text.encode()))


def test_depth_is_bounded():
    deep = '<i Type="list">' * 40 + "</i>" * 40
    with pytest.raises(faults.Fault, match="nested deeper"):
        representations.value(xml.parse(deep.encode()))


def test_properties_are_those_that_were_published_for_their_uris():
    """Clients read them by name: a change here breaks clients, and needs a new URI."""
    published = {
        "urn:muster:manage:1/Resource": "Name Type Agent Group Desired Labels DependsOn Restart Config State "
        "Reason Since Drift Restarts Manager Epoch Generation Applied AppliedBy WaitsFor",
        "urn:muster:manage:1/Agent": "Name State Resources Zone Labels Facts Types Machine Cordoned",
        "urn:muster:manage:1/Manager": "Name Resources ExpiresInS Leaving",
    }
    resource = representations.resource(
        msgspec.structs.replace(described(depends_on=["db"]), waits_for=["db"])
    )
    elements = {
        namespaces.RESOURCE: resource,
        namespaces.AGENT: representations.simple(namespaces.AGENT, rows.AgentRow(name="a")),
        namespaces.MANAGER: representations.simple(
            namespaces.MANAGER, rows.ManagerRow(name="m", expires_in_s=1.0)
        ),
    }
    actual = {uri: " ".join(child.local for child in element.children) for uri, element in elements.items()}
    assert actual == published
