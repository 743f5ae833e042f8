from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, health, messages
from muster.monitor.sensor import metric_formats, service_reports


def service_report(name: str = "shop", **metrics: float) -> messages.ServiceReport:
    return messages.ServiceReport(name=name, metrics=metrics)


def test_a_pushed_report_holds_then_is_late_then_is_gone():
    held = service_reports.ServiceReports()
    held.push(service_report(orders_s=2.0), 0.0, period_s=10.0)
    assert held.collect(5.0) == (service_report(orders_s=2.0),)
    late = held.collect(31.0)[0]
    assert (late.state, late.metrics) == (health.HealthState.LATE, {"orders_s": 2.0})
    assert held.collect(301.0) == ()


def test_services_are_bounded():
    held = service_reports.ServiceReports()
    for number in range(service_reports.SERVICES_MAX):
        held.push(service_report(str(number)), 0.0)
    with pytest.raises(errors.LimitExceeded):
        held.push(service_report("one too many"), 0.0)


def test_metrics_of_a_service_beyond_the_limit_are_dropped_and_counted():
    held = service_reports.ServiceReports()
    names = [f"m{number}" for number in range(service_reports.METRICS_MAX + 2)]
    for _ in range(2):
        held.push(service_report("shop", **dict.fromkeys(names, 1.0)), 0.0)
    assert list(held.collect(1.0)[0].metrics) == names[:-2]
    assert held.dropped == {"service-metrics": 4}


def test_services_with_too_many_metrics_are_forgotten_with_their_reports():
    held = service_reports.ServiceReports()
    metrics = dict.fromkeys((f"m{number}" for number in range(service_reports.METRICS_MAX + 1)), 1.0)
    for number in range(service_reports.SERVICES_MAX):
        held.push(service_report(f"s{number}", **metrics), 0.0)
    with pytest.raises(errors.LimitExceeded):
        held.push(service_report("one-more", **metrics), 0.0)
    assert len(held._truncated) == service_reports.SERVICES_MAX
    held.collect(10.0 * (service_reports.FORGET_AFTER + 1))
    assert not held._truncated


def test_statsd_counters_are_rates_timers_means_and_sets_counts():
    held = service_reports.ServiceReports()
    assert held.collect(0.0) == ()
    held.statsd(b"shop.orders:3|c\nshop.orders:1|c|@0.5\nshop.users:ann|s\nshop.users:bob|s\n", 1.0)
    held.statsd(b"shop.took:10|ms\nshop.took:30|ms\nshop.depth:7|g\nshop.depth:-2|g|#a:b\nplain:1|g", 2.0)
    actual = {entry.name: entry.metrics for entry in held.collect(10.0)}
    assert actual == {
        "shop": {
            "orders_s": 0.5,
            "users_distinct": 2.0,
            "took_count": 2.0,
            "took_mean": 20.0,
            "took_max": 30.0,
            "depth": 5.0,
        },
        "statsd": {"plain": 1.0},
    }
    assert held.collect(20.0)[0].metrics == {"depth": 5.0}  # a gauge stays
    late = held.collect(2.0 + service_reports.LATE_AFTER * service_reports.STATSD_PERIOD_S + 1)[0]
    assert (late.name, late.state) == ("shop", health.HealthState.LATE)
    assert held.collect(2.0 + service_reports.FORGET_AFTER * service_reports.STATSD_PERIOD_S + 1) == ()


def test_statsd_takes_updates_when_it_is_full_and_newcomers_for_what_fell_silent():
    held = service_reports.ServiceReports()
    lines = [f"app.g{number}:1|g" for number in range(service_reports.METRICS_MAX)]
    held.statsd("\n".join([*lines, "app.g0:99|g", "app.more:1|g"]).encode(), 1.0)
    assert held.collect(2.0)[0].metrics["g0"] == 99.0
    assert held.dropped == {"statsd-metrics": 1}
    later_s = 2.0 + service_reports.FORGET_AFTER * service_reports.STATSD_PERIOD_S
    held.statsd(b"app.more:1|g", later_s)
    assert held.collect(later_s)[0].metrics == {"more": 1.0}

    held = service_reports.ServiceReports()
    for number in range(service_reports.SERVICES_MAX + 1):
        held.statsd(f"service{number}.x:1|g".encode(), 1.0)
    assert held.dropped == {"statsd-services": 1}
    held.statsd(b"newcomer.x:1|g", later_s)
    assert [entry.name for entry in held.collect(later_s)] == ["newcomer"]


def test_timers_count_as_the_metrics_that_they_become():
    held = service_reports.ServiceReports()
    held.statsd("\n".join(f"app.t{number}:5|ms" for number in range(400)).encode(), 1.0)
    (app,) = held.collect(2.0)
    assert len(app.metrics) == 3 * (service_reports.METRICS_MAX // 3)
    assert held.dropped == {"statsd-metrics": 400 - service_reports.METRICS_MAX // 3}


def test_text_that_is_not_unicode_reaches_no_node_report():
    lone = json.dumps(
        {"resourceMetrics": [{"scopeMetrics": [{"metrics": [_gauge("x\ud800"), _gauge("good")]}]}]}
    )
    held = service_reports.ServiceReports()
    for report in metric_formats.service_reports(metric_formats.otlp_json(lone.encode())):
        held.push(report, 0.0)
    assert messages.encode(
        messages.NodeReport(machine="m", sequence=1, at_ms=1, period_s=1, services=held.collect(1.0))
    )
    assert set(held.collect(1.0)[0].metrics) == {"x?", "good"}
    with pytest.raises(messages.MalformedMessage):
        held.push(service_report("\ud800"), 0.0)


def _gauge(name: str) -> dict[str, object]:
    return {"name": name, "gauge": {"dataPoints": [{"asDouble": 1}]}}


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"a:1|c", b"a.b:x|c", b"a.b:1|c|@0"]), max_size=20))
def test_rubbish_in_statsd_is_counted(datagrams):
    held = service_reports.ServiceReports()
    for data in datagrams:
        held.statsd(data, 0.0)
    held.statsd(b"x.y:nan|g\nx.y:1e999|g\nx.y:|c\n:|\n", 0.0)
    assert held.dropped["statsd-malformed"] >= 4


OTLP = {
    "resourceMetrics": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]},
            "scopeMetrics": [
                {
                    "metrics": [
                        {"name": "depth", "gauge": {"dataPoints": [{"asDouble": 2.5}]}},
                        {
                            "name": "requests",
                            "sum": {
                                "dataPoints": [
                                    {
                                        "asInt": "7",
                                        "attributes": [{"key": "code", "value": {"intValue": "500"}}],
                                    }
                                ]
                            },
                        },
                        {"name": "took", "histogram": {"dataPoints": [{"count": "4", "sum": 9.0}]}},
                    ]
                }
            ],
        }
    ]
}
WANTED = {"shop": {"depth": 2.5, "requests{code=500}": 7.0, "took_count": 4.0, "took_sum": 9.0}}


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])


def _pb(field: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return bytes([field << 3]) + _varint(value)
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _fixed(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 1]) + value


def otlp_as_protobuf() -> bytes:
    name = _pb(1, _pb(1, b"service.name") + _pb(2, _pb(1, b"shop")))
    gauge = _pb(1, b"depth") + _pb(5, _pb(1, _fixed(4, struct.pack("<d", 2.5))))
    code = _pb(7, _pb(1, b"code") + _pb(2, _pb(3, 500)))
    total = _pb(1, b"requests") + _pb(7, _pb(1, _fixed(6, struct.pack("<q", 7)) + code))
    took = _fixed(4, struct.pack("<Q", 4)) + _fixed(5, struct.pack("<d", 9.0))
    histogram = _pb(1, b"took") + _pb(9, _pb(1, took))
    scope = b"".join(_pb(2, metric) for metric in (gauge, total, histogram))
    return _pb(1, _pb(1, name) + _pb(2, scope))


def test_otlp_as_json_and_as_protobuf():
    assert metric_formats.otlp_json(json.dumps(OTLP).encode()) == WANTED
    assert metric_formats.otlp_protobuf(otlp_as_protobuf()) == WANTED


def test_negative_integers_of_otlp_keep_their_sign():
    """An int64 attribute is a varint of its two's complement, an int64 value a fixed 64-bit number."""
    minus_three = bytes([0xFD, *[0xFF] * 8, 0x01])
    attribute = _pb(1, b"offset") + _pb(2, bytes([3 << 3]) + minus_three)
    point = _fixed(6, struct.pack("<q", -7)) + _pb(7, attribute)
    metric = _pb(1, b"change") + _pb(5, _pb(1, point))
    assert metric_formats.otlp_protobuf(_pb(1, _pb(2, _pb(2, metric)))) == {
        "otlp": {"change{offset=-3}": -7.0}
    }


@given(st.binary(max_size=80))
def test_rubbish_is_no_otlp(data):
    for read in (metric_formats.otlp_json, metric_formats.otlp_protobuf):
        try:
            read(data)
        except errors.InvalidInput:
            continue


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_byte_of_protobuf_is_an_error_of_ours_or_harmless(place, byte):
    good = otlp_as_protobuf()
    place %= len(good)
    with contextlib.suppress(errors.InvalidInput):
        metric_formats.otlp_protobuf(good[:place] + bytes([byte]) + good[place + 1 :])


def test_openmetrics_and_the_classic_text():
    classic = '# TYPE a counter\na_total{x="1"} 5\nb 2.5\nc_bucket{le="1"} 3\nd NaN\n'
    expected = {"app": {"a_total{x=1}": 5.0, "b": 2.5}}
    assert metric_formats.openmetrics(classic, "app") == expected
    strict = '# TYPE a counter\na_total{x="1"} 5\n# TYPE b gauge\nb 2.5\n# EOF\n'
    assert metric_formats.openmetrics(strict, "app", content_type="application/openmetrics-text") == expected
    for invalid in ("{{{ 1 1 1 x", f"# TYPE a counter\na_total {'9' * 400}\n# EOF\n"):
        with pytest.raises(errors.InvalidInput):
            metric_formats.openmetrics(invalid, "app", content_type="application/openmetrics-text")
