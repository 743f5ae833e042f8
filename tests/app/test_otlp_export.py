"""Metrics, log events, spans and activities out by OTLP; a sensor of ours can be the collector of metrics."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from muster.app.export import otlp_activities
from muster.bus.http import telemetry_export
from muster.bus.rpc import client as rpc
from muster.bus.rpc import server
from muster.core import errors, messages, subjects
from muster.core.settings import domain
from muster.core.telemetry import log, metrics, otlp, trace
from muster.monitor.sensor import metric_formats
from muster.testing.eventually import eventually
from tests.app.otlp_sink import Collector


def measured() -> metrics.Metrics:
    made = metrics.Metrics()
    made.counter("bus_refused", "Refused.", ("reason",)).add(3, reason="forbidden")
    made.gauge("machines", "Machines.").set(7)
    took = made.histogram("took_seconds", "Took.", buckets=(0.1, 1.0))
    for value in (0.05, 0.5, 0.5, 5.0):
        took.observe(value)
    return made


def test_the_form():
    body = json.loads(otlp.encode(measured().families(), {"service.name": "m"}, start_ns=1, now_ns=2))
    (resource,) = body["resourceMetrics"]
    assert resource["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "m"}}]
    actual = {row["name"]: row for row in resource["scopeMetrics"][0]["metrics"]}
    (point,) = actual["muster_bus_refused"]["sum"]["dataPoints"]
    assert (point["asDouble"], point["startTimeUnixNano"], point["timeUnixNano"]) == (3.0, "1", "2")
    assert point["attributes"] == [{"key": "reason", "value": {"stringValue": "forbidden"}}]
    assert actual["muster_bus_refused"]["sum"]["isMonotonic"] is True
    assert actual["muster_machines"]["gauge"]["dataPoints"][0]["asDouble"] == 7.0
    (point,) = actual["muster_took_seconds"]["histogram"]["dataPoints"]
    assert (point["count"], point["sum"]) == ("4", 6.05)
    assert (point["explicitBounds"], point["bucketCounts"]) == ([0.1, 1.0], ["1", "2", "1"])


def test_values_that_json_or_the_protocol_cannot_hold_are_text():
    """A collector refuses a whole request for one of them."""
    made = metrics.Metrics()
    made.gauge("load", "Load.").set(math.nan)
    body = json.loads(otlp.encode(made.families(), {}, start_ns=1, now_ns=2))
    (metric,) = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert metric["gauge"]["dataPoints"][0]["asDouble"] == "NaN"
    facts = {"far": -math.inf, "huge": 1 << 63, "least": -(1 << 63)}
    body = json.loads(otlp.encode_logs([otlp.LogEntry(1, "info", "x", facts)], {}))
    (record,) = body["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    assert [row["value"] for row in record["attributes"]] == [
        {"doubleValue": "-Infinity"},
        {"stringValue": str(1 << 63)},
        {"intValue": str(-(1 << 63))},
    ]


def test_our_own_sensor_understands_it():
    figures = metric_formats.otlp_json(
        otlp.encode(measured().families(), {"service.name": "m"}, start_ns=1, now_ns=2)
    )
    assert 7.0 in figures["m"].values()
    assert 3.0 in figures["m"].values()


async def test_it_is_sent_now_and_then_and_at_the_end(collector: Collector):
    settings = domain.HealthSettings(otlp_url=collector.url, otlp_period_s=1.0, otlp_signals=("metrics",))
    async with telemetry_export.export_telemetry(settings, "p1", measured()):
        await eventually(lambda: collector.got)
    assert len(collector.got) >= 2
    path, body = collector.got[-1]
    assert path == "/v1/metrics"
    assert b"muster_machines" in body
    assert b"p1" in body


@pytest.mark.parametrize("status", [503, 400])
async def test_a_collector_that_refuses_costs_nothing_but_a_count(collector: Collector, status: int):
    collector.status = status
    made = measured()
    assert not await telemetry_export.otlp_exporter(collector.url, "p", made).export()
    assert not await telemetry_export.otlp_exporter("http://127.0.0.1:9", "p", made).export()
    assert made.value("muster_otlp_exports_total", outcome="failed") == 2


async def test_without_an_address_nothing_is_sent():
    before = len(asyncio.all_tasks())
    async with telemetry_export.export_telemetry(domain.HealthSettings(), "p", measured()):
        assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("url", ["ftp://x", "http://user:secret@x"])
def test_a_wrong_address_is_refused_with_the_settings(url: str):
    with pytest.raises(errors.InvalidInput, match="otlp_url"):
        domain.HealthSettings(otlp_url=url)


# -- log events and spans ----------------------------------------------------------------------------------


def span(problem: str = "") -> otlp.FinishedSpan:
    context = trace.TraceContext("ab" * 16, "cd" * 8)
    facts = {"identity": "ann", "tries": 2, "share": 0.5, "durable": True}
    return otlp.FinishedSpan(
        context, "ef" * 8, "manage request.apply", otlp.SpanKind.SERVER, 1, 2, facts, problem
    )


def test_the_form_of_spans():
    body = json.loads(otlp.encode_spans([span(), span("Conflict: no")], {"service.name": "m"}))
    plain, failed = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert (plain["traceId"], plain["spanId"], plain["parentSpanId"]) == ("ab" * 16, "cd" * 8, "ef" * 8)
    assert (plain["name"], plain["kind"]) == ("manage request.apply", 2)
    assert (plain["startTimeUnixNano"], plain["endTimeUnixNano"]) == ("1", "2")
    assert [row["value"] for row in plain["attributes"]] == [
        {"stringValue": "ann"},
        {"intValue": "2"},
        {"doubleValue": 0.5},
        {"boolValue": True},
    ]
    assert "status" not in plain
    assert failed["status"] == {"code": 2, "message": "Conflict: no"}


def settings_for(collector: Collector, *signals: str) -> domain.HealthSettings:
    return domain.HealthSettings(otlp_url=collector.url, otlp_signals=signals)  # type: ignore[arg-type]


def records(collector: Collector, path: str) -> list[dict[str, Any]]:
    signal, rows = {"/v1/logs": ("Logs", "logRecords"), "/v1/traces": ("Spans", "spans")}[path]
    bodies = [json.loads(body) for at, body in collector.got if at == path]
    return [row for body in bodies for row in body[f"resource{signal}"][0][f"scope{signal}"][0][rows]]


async def test_log_events_are_exported_with_their_trace(collector: Collector):
    async with telemetry_export.export_telemetry(settings_for(collector, "logs"), "p1", metrics.Metrics()):
        trace.current.set(trace.TraceContext("ab" * 16, "cd" * 8))
        log.EventLog("bus").warning("lease-lost", lease="manager-1", epoch=7)
        trace.current.set(None)
        log.EventLog("bus").error("broken", error=ValueError("\ud800"))
    lost, broken = records(collector, "/v1/logs")
    assert (lost["body"], lost["severityNumber"]) == ({"stringValue": "lease-lost"}, 13)
    assert (lost["traceId"], lost["spanId"]) == ("ab" * 16, "cd" * 8)
    facts = {row["key"]: row["value"] for row in lost["attributes"]}
    assert facts == {
        "part": {"stringValue": "bus"},
        "lease": {"stringValue": "manager-1"},
        "epoch": {"intValue": "7"},
    }
    assert (broken["severityNumber"], "traceId" in broken) == (17, False)
    log.EventLog("bus").warning("after-the-end")
    assert len(records(collector, "/v1/logs")) == 2


async def test_a_request_is_one_trace_over_caller_and_service(collector: Collector, connect):
    service, caller = await connect("service"), await connect("caller")

    async def fail() -> None:
        raise errors.Conflict("no")

    async def done() -> str:
        return trace.current.get().trace_id  # type: ignore[union-attr]

    operations = [
        server.RpcOperation.plain("request.done", done),
        server.RpcOperation.plain("request.fail", fail),
    ]
    measure = metrics.Metrics()
    async with (
        telemetry_export.export_telemetry(settings_for(collector, "traces"), "p1", measure),
        server.RpcServer(service, "lab", operations),
    ):
        trace_id = await rpc.call(
            caller, subjects.from_identity("lab", "caller", "request", "done"), timeout_s=10
        )
        with pytest.raises(errors.Conflict):
            await rpc.call(caller, subjects.from_identity("lab", "caller", "request", "fail"), timeout_s=10)
    spans = records(collector, "/v1/traces")
    first = {row["kind"]: row for row in spans if row["traceId"] == trace_id}
    assert first[2]["parentSpanId"] == first[3]["spanId"]
    assert "parentSpanId" not in first[3]
    assert first[2]["name"] == first[3]["name"] == "lab request.done"
    failed = [row for row in spans if row["traceId"] != trace_id]
    assert len(failed) == 2
    assert all("Conflict" in row["status"]["message"] for row in failed)
    assert measure.value("muster_otlp_traces_total", outcome="accepted") == 4


async def test_records_wait_for_a_collector_and_what_it_refuses_is_counted(collector: Collector):
    measure = metrics.Metrics()
    exporter = telemetry_export.SignalExporter("traces", collector.url, otlp.encode_spans, "p", measure)
    collector.status = 503
    exporter.add(span())
    assert not await exporter.export()
    collector.status = 200
    assert await exporter.export()
    collector.status = 400
    exporter.add(span())
    assert await exporter.export(), "another answer is not expected"
    assert measure.value("muster_otlp_traces_total", outcome="accepted") == 1
    assert measure.value("muster_otlp_traces_total", outcome="refused") == 1
    for _ in range(telemetry_export.WAITING_MAX + 3):
        exporter.add(span())
    assert measure.value("muster_otlp_traces_total", outcome="dropped") == 3


def test_a_text_that_is_no_unicode_does_not_stop_the_export_of_the_others():
    text = "no such file: \udcff"  # as Python reads a file name that is not UTF-8
    context = trace.TraceContext("ab" * 16, "cd" * 8)
    failed = otlp.FinishedSpan(context, "", text, otlp.SpanKind.SERVER, 1, 2, {text: text}, problem=text)
    assert b"no such file: ?" in otlp.encode_spans([failed], {})
    assert b"no such file: ?" in otlp.encode_logs([otlp.LogEntry(1, "error", text, {text: text})], {})


def test_an_entry_of_the_activity_log_is_a_log_record():
    entry = messages.Decision(
        id="1", at_ms=5, who="web", on_behalf_of="ann", what="apply", target="web-1", why="",
        outcome=messages.DecisionOutcome.REFUSED, trace_id="ab" * 16,
    )  # fmt: skip
    body = json.loads(otlp.encode_logs([otlp_activities.to_entry(entry, "lab")], {}))
    (record,) = body["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    assert record["body"]["stringValue"].startswith("ann: apply web-1: refused")
    assert (record["severityText"], record["traceId"], record["timeUnixNano"]) == (
        "WARNING",
        "ab" * 16,
        "5000000",
    )
    facts = {row["key"]: row["value"]["stringValue"] for row in record["attributes"]}
    assert (facts["what"], facts["who"], facts["domain"]) == ("apply", "web", "lab")


async def test_the_activity_log_reaches_a_collector_that_was_away(collector: Collector):
    part = otlp_activities.OtlpActivities(collector.url)
    entry = messages.Decision(
        id="1",
        at_ms=5,
        who="ann",
        what="apply",
        target="web-1",
        why="",
        outcome=messages.DecisionOutcome.DONE,
    )
    collector.status = 503
    with pytest.raises(errors.Unavailable):
        await part._deliver(entry, "lab")
    collector.status = 200
    await part._deliver(entry, "lab")
    assert len(records(collector, "/v1/logs")) == 2  # the first of them was not accepted
