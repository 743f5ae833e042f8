"""The three output formats."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.cli import command, main, output
from muster.core.formats import cell_texts
from muster.trust.permissions import roles
from muster.web import server
from muster.web.components import texts
from tests.cli import driver

ROWS: list[dict[str, Any]] = [
    {"name": "b1", "state": "healthy", "ports": [4222, 8222], "note": None},
    {"name": "b2-with-a-long-name", "state": "failed", "ports": [], "note": "why"},
]


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_table_is_aligned_and_has_no_trailing_spaces(capsys):
    output.Printer("table").rows(ROWS, ("name", "state", "ports"))
    assert printed(capsys) == (
        "NAME                 STATE    PORTS\n"
        "b1                   healthy  4222, 8222\n"
        "b2-with-a-long-name  failed\n"
    )


def test_away_from_a_terminal_a_row_stays_one_line(capsys):
    output.Printer("table").rows([{"name": "n", "path": "x" * 500}], ("name", "path"))
    assert len(printed(capsys).splitlines()) == 2


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_json_and_yaml_carry_everything(form, read, capsys):
    output.Printer(form).rows(ROWS, ("name",))
    assert read(printed(capsys)) == ROWS


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_values_of_any_kind_are_carried(form, read, capsys):
    output.Printer(form).facts({"role": roles.Role.USER, "at": Path("a/b"), "pair": (1, 2.5)})
    assert read(printed(capsys)) == {"role": "user", "at": "a/b", "pair": [1, 2.5]}


def test_an_empty_result_names_a_text_without_quotes():
    assert command.empty_result("none", [], "tier = front").startswith("none; front is read as an attribute")
    assert command.empty_result("none", [], "tier = 'front'") == "none"
    assert command.empty_result("none", ["web"], "tier = front") == "none"


def test_an_empty_list_is_an_empty_list_for_programs_and_a_sentence_for_people(capsys):
    output.Printer("json").rows([], ("name",), empty="nothing yet")
    assert json.loads(printed(capsys)) == []
    output.Printer("table").rows([], ("name",), empty="nothing yet")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "nothing yet\n"


def test_a_stream_is_one_json_object_a_line(capsys):
    printer = output.Printer("json")
    for number in (1, 2):
        printer.item({"n": number, "text": "é\n"}, "…")
    assert [json.loads(line)["n"] for line in printed(capsys).splitlines()] == [1, 2]


def test_a_stream_in_yaml_is_one_document_each(capsys):
    for number in (1, 2):
        output.Printer("yaml").item({"n": number}, "…")
    assert [document["n"] for document in yaml.safe_load_all(printed(capsys))] == [1, 2]


def test_facts_leave_out_what_is_not_there(capsys):
    output.Printer("table").facts({"log_file": None, "data_folder": "/x"})
    assert printed(capsys) == "data folder  /x\n"


def test_a_hostile_line_cannot_take_over_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.Printer("table").item({}, "a\x1b[2J\x9b1m\tb\nc")
    assert printed(capsys) == "a\\x1b[2J\\x9b1m\tb\nc\n"


def test_a_hostile_error_cannot_take_over_the_terminal(capsys, monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    output.Printer("table").done({}, "done \x1b[2J")
    output.Printer("table").note("note \x1b[2J")
    main._report(command.Invocation(), "refused", "error \x1b[2J", "hint \x1b[2J")
    shown = capsys.readouterr()
    assert shown.out == "done \\x1b[2J\n"
    assert shown.err == "note \\x1b[2J\nerror: error \\x1b[2J\nhint: hint \\x1b[2J\n"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (6_312_000_000, "6.3 GB"), (3 << 50, "3,377.7 TB")],
)
def test_the_command_line_and_the_dashboard_show_the_same_sizes(count, shown):
    assert cell_texts.cell("used_bytes", count) == texts.size(count) == shown


@pytest.mark.parametrize(("share", "shown"), [(0, "0.0 %"), (10.93, "10.9 %"), (100, "100.0 %")])
def test_the_command_line_and_the_dashboard_show_the_same_shares(share, shown):
    assert cell_texts.cell("cpu_percent", share) == texts.percent(share) == shown


def test_only_the_server_formats_figures_of_the_dashboard():
    """The script of the pages replaces sections that the server renders. Charts format their values only."""
    script = (Path(server.__file__).parent / "static" / "muster.js").read_text()
    assert not re.search(r"toFixed|toLocaleString|toPrecision|NumberFormat|\b[kMGT]i?B\b", script)


def on_a_terminal(**environment: str) -> bytes:
    """What ``muster profile list`` of an unknown profile writes when stderr is a terminal."""
    leader, follower = pty.openpty()
    try:
        subprocess.run(
            driver.command_line("profile", "show", "nobody"),
            env={**driver.environment(), **environment},
            stderr=follower,
            check=False,
            timeout=30,
        )
        return os.read(leader, 4096)
    finally:
        os.close(leader)
        os.close(follower)


def test_colour_on_a_terminal_unless_NO_COLOR():
    assert b"\x1b[" in on_a_terminal(NO_COLOR="", TERM="xterm")
    assert b"\x1b[" not in on_a_terminal(NO_COLOR="1", TERM="xterm")
    assert b"\x1b[" not in on_a_terminal(NO_COLOR="", TERM="dumb")


def at_a_terminal(program: str, **environment: str) -> tuple[str, str]:
    """What it writes to stdout, and what a person at a terminal sees beside that (its stderr)."""
    near, far = pty.openpty()
    clean = {**driver.environment(), "TERM": "xterm", **environment}
    if "NO_COLOR" not in environment:
        clean.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean, stdout=subprocess.PIPE, stderr=far, text=True, check=True
    )
    os.close(far)
    seen = b""
    try:
        while piece := os.read(near, 65536):
            seen += piece
    except OSError:  # the error of a terminal whose other end is closed
        pass
    os.close(near)
    return done.stdout, seen.decode()


LONG_WORK = (
    "from muster.cli import output\n"
    "with output.Printer({form!r}).progress('backing up') as say:\n"
    "    for number in range(5): say(f'stream {{number}}', number / 5)\n"
    "print('done')\n"
)

SPARK = (
    "import os, pathlib\n"
    "from muster.cli import output\n"
    "from muster.pipeline.source import session\n"
    "with output.Printer('table').waiting('running the query'), "
    "session._output_to(pathlib.Path('spark.log')):\n"
    "    os.write(1, b'WARN of Spark')\n"
    "    os.write(2, b'WARN of Java')\n"
    "print('done')\n"
)


def test_what_spark_prints_does_not_reach_the_terminal_and_the_spinner_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, seen = at_a_terminal(SPARK)
    assert out == "done\n"
    assert "running the query" in seen
    assert "0:00:0" in seen
    assert "WARN" not in seen
    assert (tmp_path / "spark.log").read_text() == "WARN of SparkWARN of Java"


def test_long_work_shows_a_bar_at_a_terminal_only_and_never_among_the_data():
    out, seen = at_a_terminal(LONG_WORK.format(form="table"))
    assert out == "done\n"
    assert "backing up: stream 4" in seen
    assert "80%" in seen
    for form, environment in (("json", {}), ("table", {"NO_COLOR": "1"})):
        assert at_a_terminal(LONG_WORK.format(form=form), **environment) == ("done\n", "")
    away = subprocess.run(
        [sys.executable, "-c", LONG_WORK.format(form="table")],
        env=driver.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (away.stdout, away.stderr) == ("done\n", "")
