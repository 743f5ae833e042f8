"""Tables of rows on pages: the columns of the command line, with the same titles and units."""

from __future__ import annotations

import re

import markupsafe
import pytest

from muster.core import messages
from muster.manage import operations, rows
from muster.web.components import templates

AGENT = rows.AgentRow(name="east-1", state="up", resources=12_345, labels={"rack": "7"}, cordoned=True)


def heads(table: str) -> list[tuple[str, bool]]:
    return [(title, "num" in start) for start, title in re.findall(r"<th( [^>]*)>(.*?)</th>", table)]


def cells(table: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", table.partition("<tbody>")[2])


def test_a_table_has_the_columns_of_the_command_line_in_its_units():
    table = templates.table([AGENT], operations.AGENTS.columns, label="Agents")
    titles = [column.removesuffix("?").capitalize() for column in operations.AGENTS.columns]
    assert [title for title, _ in heads(table)] == titles
    assert cells(table) == [
        "east-1",
        templates.widget("badge", "up"),
        "default",
        "12,345",
        "0",
        "yes",
        "rack=7",
    ]


def test_numbers_are_on_the_right_and_times_are_not():
    alert = messages.Alert(
        rule="hot",
        about="node:web-1",
        severity=messages.Severity.CRITICAL,
        state=messages.AlertState.FIRING,
        since_ms=1_800_000_000_000,
        at_ms=1_800_000_000_000,
        value=None,
    )
    table = templates.table([alert], ("severity", "since_ms", "value"), label="Alerts")
    assert heads(table) == [("Severity", False), ("Since", False), ("Value", False)]
    assert cells(table)[0] == templates.widget("badge", "critical")
    assert "2027-01-15" in cells(table)[1]
    table = templates.table([AGENT], ("name", "resources"), label="Agents")
    assert heads(table) == [("Name", False), ("Resources", True)]


def test_a_cell_can_show_more_than_its_field_and_further_ones_follow():
    given = {
        "name": lambda row: templates.widget("to", row.name, "/x"),
        "#cpu": lambda _: "7",
        "": lambda _: markupsafe.Markup("<b>!</b>"),
    }
    table = templates.table([AGENT], ("name", "zone?"), cells=given, label="Agents")
    assert heads(table) == [("Name", False), ("Zone", False), ("CPU", True)]
    assert cells(table)[0] == '<a href="/x">east-1</a>'
    assert cells(table)[2:] == ["7", "<b>!</b>"]


@pytest.mark.parametrize("text", ["<script>", "a & b"])
def test_text_is_escaped(text: str):
    table = templates.table([rows.AgentRow(name=text)], ("name",), label="Agents")
    assert cells(table) == [markupsafe.escape(text)]
