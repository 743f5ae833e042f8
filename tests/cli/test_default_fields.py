"""A field at its default is part of the output for programs, although the wire omits it."""

from __future__ import annotations

import json

import msgspec
import pytest

from muster.cli import command
from muster.cli.monitoring import alert, report, top
from muster.core import messages
from muster.core.reports import columns

NODE = messages.NodeReport(machine="web-1", sequence=1, at_ms=1, period_s=1.0)
SYSTEM = columns.SystemReport(from_ms=0, to_ms=1, machines=0)


def fields(of: msgspec.Struct) -> set[str]:
    return {*of.__struct_encode_fields__, "kind"}


def test_of_a_report(capsys: pytest.CaptureFixture[str]):
    report.show(command.Invocation(output="json"), NODE)
    assert json.loads(capsys.readouterr().out).keys() == fields(NODE)


def test_of_the_report_on_the_fleet(capsys: pytest.CaptureFixture[str]):
    top._once(command.Invocation(output="json"), SYSTEM, "machines")
    assert json.loads(capsys.readouterr().out).keys() == fields(SYSTEM)


def test_an_alert_is_selected_by_a_field_at_its_default():
    raised = messages.Alert(
        rule="silence",
        about="node:web-1",
        severity=messages.Severity.INFO,
        state=messages.AlertState.FIRING,
        since_ms=1,
        at_ms=1,
    )
    assert alert._selector("reason = ''")(raised)
    assert alert._selector("value IS NULL")(raised)
