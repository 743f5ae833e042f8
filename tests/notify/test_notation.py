from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies
from lxml import etree

from muster.core import errors
from muster.notify import documents as notify_documents
from muster.notify import models
from muster.predicates import types

PAPER = """
// The models, a state and the policy of the paper.
WebServer = {
  String application;
  String application_version;
  String serviceIPAddress;
  int servicePort;
  DomainedSet{docs, cgi, xml} services;
  float load
}
Controller = { String entity; String _command_region; int _trust_level }
event alert = { int threat_level }
event command = { }
state web-1 = WebServer {
  application = "IIS";
  application_version = "2.4.0 \\"beta\\" <&>";
  serviceIPAddress = "128.142.55.55";
  servicePort = 8080;
  services = {docs, cgi};
  load = 0.39
}
policy web = {
  (alert AND (threat_level >= 4)) AND
  (sender: (_command_region == "northwest" AND _trust_level >= 2))
} OR
{
  (command AND (sender: (entity == "Intellimune" AND _command_region == "national")))
};
"""
SCHEMA = pathlib.Path(__file__).parents[2] / "docs/schemas/notify.xsd"


def test_the_papers_notation_is_read():
    document = notify_documents.read(PAPER.encode())
    assert [item.name for item in document.models] == ["WebServer", "Controller", "alert", "command"]
    assert document.models[0].attributes["services"] == types.set_of("docs", "cgi", "xml")
    assert document.models[2].kind is models.ModelKind.EVENT
    state = document.states[0].values
    assert (state["servicePort"], state["services"], state["load"]) == (
        8080,
        frozenset({"docs", "cgi"}),
        0.39,
    )
    vocabulary = models.Vocabulary()
    for model in document.models:
        vocabulary.add(model)
    vocabulary.policy(document.policies["web"])


ALONE = """
WebServer = {
  application = "IIS";
  services = {docs, cgi};
  load = 0.39
}
Controller = {
  String _command_region = "northwest";
  int _trust_level = 4
}
{
  (alert AND (threat_level >= 4)) AND
  (sender: (_command_region == "northwest" AND _trust_level >= 2))
} OR
{
  (command AND (sender: (entity == "Intellimune" AND _command_region == "national")))
}
"""


@pytest.mark.parametrize("form", ["yaml", "json", "notation", "xml"])
def test_what_stands_alone_in_the_paper_is_read_and_written(form: Any):
    document = notify_documents.read(ALONE.encode())
    webserver, controller = document.states
    assert (webserver.receiver, webserver.model, webserver.values["load"]) == ("", "WebServer", 0.39)
    assert controller.granted == {"_command_region": "northwest", "_trust_level": 4}
    assert [model.name for model in document.models] == ["Controller"]
    written = notify_documents.write(document, form)
    again = notify_documents.read(written.encode())
    assert (again.models, again.states) == (document.models, document.states)
    (before,), (after,) = document.policies.values(), again.policies.values()
    assert after.strip("() \n") == before.strip("() \n")
    if form == "xml":
        assert etree.XMLSchema(etree.parse(SCHEMA)).validate(etree.fromstring(written.encode()))


def test_what_stands_alone_is_of_the_receiver_that_is_named():
    state = b"WebServer = { load = 0.39 }"
    named = notify_documents.read(state + b"{ alert }").named("web-1")
    assert (named.states[0].receiver, named.policies) == ("web-1", {"web-1": "{ alert }"})
    with pytest.raises(errors.InvalidInput, match="does not say whose it is"):
        notify_documents.read(state).named("")
    with pytest.raises(errors.InvalidInput, match="two states of 'web-1'"):
        notify_documents.read(ALONE.encode()).named("web-1")
    with pytest.raises(errors.InvalidInput, match="two policies of 'web-1'"):
        notify_documents.read(b"policy web-1 = alert; { command }").named("web-1")


@pytest.mark.parametrize(
    "text",
    [
        "event alert = { int level = 4 }",
        "Controller = { int level = 4; load = 0.5 }",
        "state web-1 = WebServer { int level = 4 }",
        "{ alert }; { command }",
    ],
)
def test_values_and_policies_stand_only_where_they_mean_something(text: str):
    with pytest.raises(errors.ParseError):
        notify_documents.read(text.encode())


ENDS = notify_documents.StateDocument(
    "web-2", "Elsewhere", {"text": "a\x85b\u2028c\rd\ne", "words": frozenset({"f\x85"})}
)


@pytest.mark.parametrize("form", ["yaml", "json", "notation", "xml"])
def test_every_form_reads_back_as_the_same(form):
    """Also what some take for the end of a line."""
    paper = notify_documents.read(PAPER.encode())
    document = dataclasses.replace(paper, states=(*paper.states, ENDS))
    text = notify_documents.write(document, form)
    assert notify_documents.read(text.encode()) == document


NAMES = strategies.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
KEYS = strategies.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
TEXT = strategies.text(
    strategies.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff")
    | strategies.sampled_from("\t\r\n\x85"),
    max_size=12,
)
WORDS = TEXT.map(lambda text: re.sub("[,{}]", "", text).strip()).filter(bool)
DECLARED = strategies.sampled_from([types.STRING, types.INT, types.FLOAT, types.BOOL]) | strategies.lists(
    WORDS, min_size=1, max_size=4, unique=True
).map(lambda words: types.set_of(*words))


def _value_of(declared: types.AttributeType) -> strategies.SearchStrategy[Any]:
    match declared.kind:
        case types.ValueKind.STRING:
            return TEXT
        case types.ValueKind.INT:
            return strategies.integers(types.INT_MIN, types.INT_MAX)
        case types.ValueKind.FLOAT:
            return strategies.floats(allow_nan=False, allow_infinity=False)
        case types.ValueKind.BOOL:
            return strategies.booleans()
        case types.ValueKind.SET:
            return strategies.frozensets(strategies.sampled_from(declared.domain))


@strategies.composite
def documents(draw: strategies.DrawFn) -> notify_documents.NotifyDocument:
    attributes = draw(strategies.dictionaries(NAMES, DECLARED, max_size=5))
    model = models.Model(draw(NAMES | strategies.sampled_from(["event", "state", "policy"])), attributes)
    values = {
        name: draw(_value_of(declared))
        for name, declared in attributes.items()
        if not models.restricted(name) and draw(strategies.booleans())
    }
    policies = draw(strategies.dictionaries(KEYS, strategies.sampled_from(["alert", "a = 'x;y' OR b"])))
    return notify_documents.NotifyDocument(
        (model,), (notify_documents.StateDocument(draw(KEYS), model.name, values),), policies
    )


@hypothesis.given(documents())
@hypothesis.settings(max_examples=60, deadline=None)
def test_every_form_of_a_document_reads_back_equal(document):
    for form in ("yaml", "json", "notation", "xml"):
        assert notify_documents.read(notify_documents.write(document, form).encode()) == document, form


def test_the_xml_keeps_to_its_schema():
    schema = etree.XMLSchema(etree.parse(str(SCHEMA)))
    text = notify_documents.write(notify_documents.read(PAPER.encode()), "xml")
    schema.assertValid(etree.fromstring(text.encode()))


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE x [<!ENTITY a "b">]><notify xmlns="urn:muster:notify:1"/>',
        "<notify/>",
        '<notify xmlns="urn:muster:notify:1"><model/></notify>',
        '<notify xmlns="urn:muster:notify:1">' + "<model>" * 20,
        "<notify",
        "WebServer = { String }",
        "WebServer = { Strange x }",
        'WebServer = { DomainedSet{docs, "a,b"} x }',
        "state web = WebServer { load = }",
        '{"models": [{"name": "A"}]}',
        "models: &a [*a]",
        "models: 3",
        "state w = W { a = 1 } WW = {",
        '<notify xmlns="urn:muster:notify:1"><model name="A" of="x"/></notify>',
        '<notify xmlns="urn:muster:notify:1"><model name="A"><b name="c" type="int"/></model></notify>',
        "models: 2001-99-99",
        "models: !!timestamp x",
        "W = { float load } state w = W { load = 1e999 }",
        f"W = {{ float load }} state w = W {{ load = {'9' * 5000} }}",
        f"""{{"models": [{{"name": "W", "attributes": {{"load": "float"}}}}],
            "states": [{{"receiver": "w", "model": "W", "values": {{"load": {"9" * 400}}}}}]}}""",
        "policies: {a b: alert}",
        "states: [{receiver: w, model: a b, values: {}}]",
        "states: [{receiver: w, model: W, values: {'a=1; b': 2}}]",
        "states: [{receiver: w, model: W, values: {load: .inf}}]",
    ],
)
def test_what_is_malformed_or_hostile_is_refused_with_a_reason(text):
    with pytest.raises((errors.InvalidInput, errors.LimitExceeded)) as refused:
        notify_documents.read(text.encode())
    assert refused.value.message


def test_a_policy_that_the_notation_cannot_hold_is_not_written_in_it():
    document = notify_documents.NotifyDocument(policies={"odd": "a = 'x"})
    assert notify_documents.read(notify_documents.write(document, "xml").encode()) == document
    with pytest.raises(errors.InvalidInput, match="policy odd"):
        notify_documents.write(document, "notation")


def test_a_state_must_match_the_model_in_the_same_document():
    with pytest.raises(errors.InvalidInput, match="no attribute lod"):
        notify_documents.read(b"W = { float load } state a = W { lod = 1 }")
