from __future__ import annotations

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from muster.core import errors, health, messages
from muster.core.reports import columns
from muster.monitor import report_xml
from tests.core import test_messages as made

SCHEMA = etree.XMLSchema(file=pathlib.Path(__file__).parents[2] / "docs/schemas/report.xsd")

counts = st.dictionaries(made.name, made.count, max_size=3)
maybe = st.none() | made.finite
rollups = st.dictionaries(
    made.name,
    st.builds(
        columns.MetricRollup,
        count=made.count,
        sum=made.finite,
        min=maybe,
        max=maybe,
        p50=maybe,
        p95=maybe,
        p99=maybe,
    ),
    max_size=3,
)
services = st.builds(
    messages.ServiceReport,
    name=made.name,
    state=st.sampled_from(health.HealthState),
    reason=made.text,
    metrics=made.metrics,
)
rolled = {
    "from_ms": made.at_ms,
    "to_ms": made.at_ms,
    "machines": made.count,
    "reports": made.count,
    "stale": made.count,
    "states": counts,
    "metrics": rollups,
    "oldest_ms": st.none() | made.at_ms,
    "dropped": counts,
    "partial": st.booleans(),
}
ranked = st.builds(columns.RankedNode, machine=made.name, value=made.finite)
groups = st.builds(
    columns.GroupReport,
    top=st.dictionaries(made.name, st.lists(ranked, min_size=1, max_size=2).map(tuple), max_size=2),
    group=made.name,
    zone=st.none() | made.name,
    nodes=st.lists(made.node_reports, max_size=2).map(tuple),
    **rolled,
)
systems = st.builds(columns.SystemReport, groups=st.lists(groups, max_size=2).map(tuple), **rolled)


@settings(deadline=None)
@given(st.one_of(services, made.node_reports, groups, systems))
def test_every_level_survives_xml_and_keeps_to_the_published_schema(report):
    data = report_xml.encode(report)
    assert report_xml.decode(data) == report
    SCHEMA.assertValid(etree.fromstring(data))


@given(st.one_of(groups, systems))
def test_the_upper_levels_survive_json(report):
    assert messages.decode(messages.encode(report), type(report)) == report


def test_what_is_unknown_is_passed_over():
    text = (
        '<node-report xmlns="urn:muster:report:1" machine="m" sequence="1" at-ms="2" period-s="3" hue="red">'
        '<metric name="cpu_percent">4</metric><later/><!-- a comment --></node-report>'
    )
    assert report_xml.decode(text.encode()) == messages.NodeReport(
        machine="m", sequence=1, at_ms=2, period_s=3.0, metrics={"cpu_percent": 4.0}
    )


LAUGHS = b'<!DOCTYPE x [<!ENTITY a "ha">' + b"".join(
    b'<!ENTITY a%d "%s">' % (i, b"&a%d;" % (i - 1) * 10 if i else b"&a;" * 10) for i in range(9)
)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "malformed"),
        (b"<node-report", "malformed"),
        (b"\xff\xfe<\x00a\x00", "malformed"),
        (LAUGHS + b"]><x>&a8;</x>", "malformed"),
        (b'<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]><x>&f;</x>', "malformed"),
        (b'<?xml version="1.0" encoding="utf-16"?><a/>', "wrong-version"),  # it is UTF-8 whatever it claims
        (b"<a>&undeclared;</a>", "malformed"),
        (b"<a>" * 5000 + b"</a>" * 5000, "malformed"),
        (b"<a/>" + bytes(report_xml.MAX_BYTES), "too-large"),
        (b'<node-report xmlns="urn:muster:report:2"/>', "wrong-version"),
        (b'<receiver xmlns="urn:muster:report:1"/>', "unknown-kind"),
        (b'<node-report xmlns="urn:muster:report:1" machine="m"/>', "malformed"),
        (
            b'<service-report xmlns="urn:muster:report:1" name="m"><metric name="a">NaN</metric>'
            b"</service-report>",
            "malformed",
        ),
        (
            b'<node-report xmlns="urn:muster:report:1" machine="m" sequence="-1" at-ms="2" period-s="3"/>',
            "malformed",
        ),
    ],
)
def test_hostile_xml_is_refused_by_reason(data, code):
    with pytest.raises(errors.MusterError) as refused:
        report_xml.decode(data)
    assert refused.value.code == code
