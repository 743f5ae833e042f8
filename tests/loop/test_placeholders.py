"""Placeholders of rules: an inserted value is never expanded again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import messages
from muster.loop import placeholders, reaction_rules, response_rules
from muster.manage import rows

VALUES = {"name": "web", "group": "{name}", "brace": "{"}


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{name} of {group}", "web of {name}"),
        ("{brace}name}", "{name}"),
        ("{other} {name", "{other} {name"),
        ("{x{name}}", "{xweb}"),
        ("{{name}}", "{web}"),
        ("", ""),
    ],
)
def test_each_placeholder_of_the_template_is_replaced_once(template: str, filled: str):
    assert placeholders.fill(template, VALUES) == filled


@given(st.text(), st.text())
def test_a_value_is_inserted_as_it_is(name: str, group: str):
    assert placeholders.fill("{name}|{group}", {"name": name, "group": group}) == f"{name}|{group}"


def test_a_name_with_a_placeholder_stays_a_name_in_responses_and_reactions():
    alert = messages.Alert(
        rule="infected",
        about="group:{rule}",
        severity=messages.Severity.CRITICAL,
        state=messages.AlertState.FIRING,
        since_ms=1,
        at_ms=2,
    )
    responses = response_rules.load(
        "responses: [{alert: infected, event: e, to: 'region = {name}', content: {of: '{name}', level: 4}}]"
    )
    (notification,) = response_rules.matching_notifications(responses, alert)
    assert notification.address == "region = '{rule}'"
    assert notification.content == {"of": "{rule}", "level": 4}

    reaction = reaction_rules.ReactionSpec(
        where="TRUE", model="Server", policy="command", state={"application": "{name}-{group}", "size": 3}
    )
    row = rows.ResourceRow(
        name="{group}", type="process", group="{agent}", agent="a", desired="up", state="up", generation=1
    )
    receivers = reaction_rules.receivers((reaction,), [[row]])
    assert receivers["{group}"].state == {"application": "{group}-{agent}", "size": 3}
