"""Tables for people: units, relative times, and columns that fit a narrow terminal."""

from __future__ import annotations

import itertools
import re
import sys

import msgspec
import pytest

from muster.cli import output, tables
from muster.core.formats import cell_texts
from muster.manage import operations
from muster.message import listings

NOW_S = 1_800_000_000.0


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("used_bytes", 6_312_000_000, "6.3 GB"),
        ("cpu_percent", 10.94, "10.9 %"),
        ("since_ms", (NOW_S - 190) * 1000, "3m10s"),
        ("since_ms", 0, ""),
        ("last_seen_at", NOW_S - 190, "3m10s ago"),
        ("expires_at", NOW_S + 7200, "in 2h"),
        ("expires_at", 0, ""),
        ("age_s", 0.0123, "12.3 ms"),
        ("age_s", 90.0, "90 s"),
        ("age_s", 3661, "1h01m"),
        ("proximity_ms", 0.0, "0 s"),
        ("proximity_ms", 250, "250 ms"),
        ("failures_ms", [(NOW_S - 5) * 1000], "5 s ago"),
        ("restarts", 12345, "12345"),
        ("load_1m", 0.30000000000000004, "0.3"),
        ("load_1m", 6.68408, "6.684"),
        ("load_1m_mean", 110.92918, "110.93"),
        ("share", 0.000123456, "0.0001235"),
        ("cpu_percent_p95", 10.94, "10.9 %"),
        ("memory_used_bytes_max", 6_312_000_000, "6.3 GB"),
        ("uptime_s_min", 3661, "1h01m"),
        ("in_per_s", 2.5, "2.5"),
        ("labels", {"tier": "front", "none": None}, "tier=front"),
        ("result", {"names": ["a", "b"], "memory_bytes": 1500}, "names=[a, b], memory_bytes=1.5 kB"),
        ("applied", True, "yes"),
        ("manager", None, ""),
    ],
)
def test_a_cell_has_the_unit_of_its_field(name, value, shown):
    assert cell_texts.cell(name, value, now_s=NOW_S) == shown


def test_a_time_in_a_sentence_has_its_zone():
    assert [tables.utc(0), tables.utc(NOW_S)] == ["", "2027-01-15 08:00:00 UTC"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("since_ms", "for"),
        ("at_ms", "age"),
        ("used_bytes", "used"),
        ("in_per_s", "in/s"),
        ("zone?", "zone"),
        ("cpu_percent_p95", "cpu p95"),
    ],
)
def test_a_title_omits_the_unit(name, shown):
    assert cell_texts.title(name) == shown


def test_no_choice_of_columns_is_wider_than_the_room_or_cuts_the_name_first():
    columns = ("name", "type?", "state", "reason", "manager?")
    for widths in itertools.product((8, 30), (0, 7), (2, 9), (0, 40, 200), (9, 30)):
        for room in (40, 80, 120):
            chosen = tables.choose(columns, widths, [min(width, 12) for width in widths], room)
            total = sum(chosen.values()) + tables.GAP * (len(chosen) - 1)
            assert total <= room
            assert all(widths[index] for index in chosen), "empty columns are dropped"
            others = list(chosen.items())[1:]
            assert chosen[0] == widths[0] or len(others) <= 1, "the name is cut last"
            if room >= 80:
                readable = all(width >= min(widths[index], tables.SHORT) for index, width in others)
                assert readable, "a column is dropped rather than made unreadable"
                needed = [index for index, column in enumerate(columns) if not column.endswith("?")]
                assert {index for index in needed if widths[index]} <= chosen.keys()


@pytest.mark.parametrize(
    ("columns", "cells", "titles"),
    [
        (
            ("queue", "depth", "in_per_s", "out_per_s", "consumers", "in_flight", "owner?"),
            ("order-processing-service-european-region", 1, 0, 0, 0, 0, "vm:1"),
            ["QUEUE", "DEPTH", "IN/S", "OUT/S", "CONSUMERS"],
        ),
        (
            ("key", "version", "attributes", "age_ms", "source?"),
            (
                "servers/a-rather-long-name-of-a-context/in-the-european-region/primary",
                2,
                "a=b, c=" + "d" * 30,
            ),
            ["KEY", "VERSION"],
        ),
    ],
)
def test_no_title_is_broken_at_eighty_columns(columns, cells, titles, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.Printer("table").rows([dict(zip(columns, cells, strict=False))], columns)
    shown = capsys.readouterr()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.out).splitlines()
    assert lines[0].split() == titles
    assert lines[1].startswith(f"{cells[0]}  ")
    assert "not shown: " in shown.err


def test_all_columns_are_shown_without_a_terminal():
    assert tables.choose(("a", "b?", "c"), (500, 500, 0), (5, 5, 0), None) == {0: 500, 1: 500}


class _Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    agent: str = "local"
    state: str = "up"
    drift: str = ""
    manager: str = "manager-1"
    reason: str = ""


def test_a_table_of_eighty_columns_keeps_names_and_wraps_reasons(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    name, reason = "web-server-in-the-east-of-the-north-12", "exit code 1; given up after 2 restarts in 300 s"
    columns = ("name", "agent", "state", "drift", "reason", "manager?")
    output.Printer("table").rows([_Row(name=name, reason=reason)], columns, of="resource")
    shown = capsys.readouterr()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.out).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert lines[0].split() == ["RESOURCE", "AGENT", "STATE", "REASON"]
    assert lines[1].startswith(f"{name}  local  up")
    assert reason == " ".join(" ".join(line.removeprefix(f"{name}  local  up") for line in lines[1:]).split())
    assert shown.err == "not shown: MANAGER (-o wide)\n"
    output.Printer("wide").rows([_Row(name=name, reason=reason)], columns)
    assert f"{reason}  manager-1" in capsys.readouterr().out


def test_an_alias_of_a_query_means_no_unit(capsys, monkeypatch):
    columns = ["cpu_percent", "used_bytes", "age_s"]
    rows = [{"cpu_percent": 10.94, "used_bytes": 123456, "age_s": 100}]
    printer = output.Printer("table")
    printer.rows(rows, columns, expands=True, measured={"cpu_percent"})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["CPU", "used_bytes", "age_s"],
        ["10.9", "%", "123456", "100"],
    ]
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printer.rows(rows, columns, expands=True, measured={"cpu_percent"})
    assert "used_bytes  123456" in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def test_rows_of_ten_columns_are_lists_on_a_terminal_of_eighty(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    columns = [f"column_{number}" for number in range(9)] + ["cpu_percent"]
    rows = [dict.fromkeys(columns, "twelve words") | {"cpu_percent": 10.94} for _ in range(2)]
    output.Printer("table").rows(rows, columns, expands=True)
    shown = capsys.readouterr()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.out).splitlines()
    assert lines[0] == "-- row 1 " + "-" * 31
    assert lines[1] == "column 0  twelve words"
    assert lines[10] == "cpu       10.9 %"
    assert lines[11].startswith("-- row 2 ")
    assert len(lines) == 22
    assert "(-o wide: as a table)" in shown.err
    output.Printer("table").rows(rows, columns[-3:], expands=True)
    assert "COLUMN 7" in capsys.readouterr().out.splitlines()[0], "what fits stays a table"
    output.Printer("wide").rows(rows, columns, expands=True)
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    output.Printer("table").rows(rows, columns, expands=True)
    assert len(capsys.readouterr().out.splitlines()) == 3, "programs that read tables get one line for a row"


def test_json_has_the_fields_at_their_default(capsys):
    output.Printer("json").rows([_Row(name="a")], ("name",))
    assert msgspec.json.decode(capsys.readouterr().out) == [
        {"name": "a", "agent": "local", "state": "up", "drift": "", "manager": "manager-1", "reason": ""}
    ]


@pytest.mark.parametrize(
    ("columns", "widths", "text"),
    [
        (operations.RESOURCES.columns, (33, 7, 9, 5, 4, 5, 3, 8, 70, 0, 9), "reason"),
        (listings.MESSAGES, (21, 11, 8, 11, 40, 40), "body"),
    ],
)
def test_a_long_name_leaves_room_for_words_of_the_text(columns, widths, text):
    """Optional columns are dropped before a text is broken inside of words; the name keeps its width."""
    words = [min(width, 10) for width in widths]
    chosen = tables.choose(columns, widths, words, 80)
    assert chosen[0] == widths[0]
    assert chosen[columns.index(text)] >= tables.NARROW


def test_the_facts_of_an_object_have_different_titles_and_maps_have_units():
    names = ("state", "batch", "batch_s", "state_bytes", "issued_at", "issued", "since_ms")
    assert cell_texts.titles(names) == {
        "state": "state",
        "batch": "batch",
        "batch_s": "batch time",
        "state_bytes": "state size",
        "issued": "issued",
        "since_ms": "for",
    }
    assert cell_texts.cell("stages_ms", {"plan": 1200, "write": 0.5}) == "plan=1.2 s, write=500 µs"
    assert cell_texts.cell("labels", {"n": 17}) == "n=17"
    assert cell_texts.cell("reported_at", "2026-11-17T16:04:21.583+00:00") == "2026-11-17 16:04:21"
