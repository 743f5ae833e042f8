"""Tables of rows on pages: the columns of the command line, with the same titles and units."""

from __future__ import annotations

import re

import pytest

from muster.core import messages
from muster.manage import operations, rows
from muster.web.components import html, records, widgets

AGENT = rows.AgentRow(name="east-1", state="up", resources=12_345, labels={"rack": "7"}, cordoned=True)


def heads(table: html.Markup) -> list[tuple[str, bool]]:
    return [(title, "num" in start) for start, title in re.findall(r"<th( [^>]*)>(.*?)</th>", table)]


def cells(table: html.Markup) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", table.partition("<tbody>")[2])


def test_a_table_has_the_columns_of_the_command_line_in_its_units():
    table = records.table([AGENT], operations.AGENTS.columns, label="Agents")
    titles = [column.removesuffix("?").capitalize() for column in operations.AGENTS.columns]
    assert [title for title, _ in heads(table)] == titles
    assert cells(table) == ["east-1", widgets.badge("up"), "default", "12,345", "0", "yes", "rack=7"]


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
    table = records.table([alert], ("severity", "since_ms", "value"), label="Alerts")
    assert heads(table) == [("Severity", False), ("Since", False), ("Value", False)]
    assert cells(table)[0] == widgets.badge("critical")
    assert "2027-01-15" in cells(table)[1]
    table = records.table([AGENT], ("name", "resources"), label="Agents")
    assert heads(table) == [("Name", False), ("Resources", True)]


def test_a_cell_can_show_more_than_its_field_and_further_ones_follow():
    given = {
        "name": lambda row: widgets.link(row.name, "/x"),
        "#cpu": lambda _: "7",
        "": lambda _: html.tag("b", "!"),
    }
    table = records.table([AGENT], ("name", "zone?"), cells=given, label="Agents")
    assert heads(table) == [("Name", False), ("Zone", False), ("CPU", True)]
    assert cells(table)[0] == '<a href="/x">east-1</a>'
    assert cells(table)[2:] == ["7", "<b>!</b>"]


@pytest.mark.parametrize("text", ["<script>", "a & b"])
def test_text_is_escaped(text: str):
    table = records.table([rows.AgentRow(name=text)], ("name",), label="Agents")
    assert cells(table) == [html.text(text)]
