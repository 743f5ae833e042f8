"""Which alert leads to which notification."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, messages
from muster.loop import response_rules
from muster.predicates.backends import python
from muster.predicates.syntax import parser

RULES = response_rules.load("""
responses:
  - alert: infected
    when: kind = 'group' AND value > 0.1
    event: command
    content: {operation: isolate, level: 4, why: "{rule} of {name}"}
    to: "region = {name} AND state <> 'patched'"
  - alert: "*"
    event: news
    to: "TRUE"
    durable: false
""")


def alert(
    rule: str = "infected", about: str = "group:north", value: float | None = 0.5, **more
) -> messages.Alert:
    fields = {
        "severity": messages.Severity.CRITICAL,
        "state": messages.AlertState.FIRING,
        "since_ms": 1,
        "at_ms": 2,
    }
    return messages.Alert(rule=rule, about=about, value=value, **{**fields, **more})


def test_every_rule_that_applies_sends():
    command, news = response_rules.matching_notifications(RULES, alert())
    assert command == response_rules.NotificationTemplate(
        "command",
        {"operation": "isolate", "level": 4, "why": "infected of north"},
        "region = 'north' AND state <> 'patched'",
        True,
    )
    assert (news.type, news.durable) == ("news", False)


@pytest.mark.parametrize(
    "other", [alert(rule="hot"), alert(about="system"), alert(value=0.01), alert(value=None)]
)
def test_a_rule_that_does_not_apply_does_not_send(other):
    assert [
        matching_notification.type
        for matching_notification in response_rules.matching_notifications(RULES, other)
    ] == ["news"]


def test_by_default_only_what_fires_is_answered():
    resolved = alert(state=messages.AlertState.RESOLVED)
    assert [
        matching_notification.type
        for matching_notification in response_rules.matching_notifications(RULES, resolved)
    ] == ["command"]


@given(st.text(max_size=60).filter(lambda name: not any("\ud800" <= c <= "\udfff" for c in name)))
def test_no_name_changes_the_meaning_of_an_address(name):
    rules = response_rules.load("responses: [{alert: a, event: e, to: 'region = {name}'}]")
    (sent,) = response_rules.matching_notifications(
        rules, alert(rule="a", about=f"group:{name}" if name else "group:x")
    )
    reaches = python.compile(parser.parse(sent.address))
    assert reaches({"region": name or "x"}.get)
    assert not reaches({"region": (name or "x") + "!"}.get)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("responses: [{alert: a, event: e, to: 'region ='}]", "response 1"),
        ("responses: [{alert: a, event: e, to: 'TRUE', when: 'colour = 1'}]", "colour"),
        ("responses: [{alert: a, event: e}]", "to"),
        ("responses: [{alert: a, event: e, to: 'TRUE', extra: 1}]", "extra"),
        ("responses: {", "not a file of responses"),
        ("[]", "not a file of responses"),
    ],
)
def test_a_fault_is_named(text, what):
    with pytest.raises(errors.InvalidInput, match=what):
        response_rules.load(text)
