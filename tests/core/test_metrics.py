from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from muster.core import errors
from muster.core.telemetry import metrics


def test_both_expositions_are_valid_and_say_the_same() -> None:
    ours = metrics.Metrics(process=True)
    ours.counter("bus_dropped_messages", "Dropped, by reason.", ("reason",)).add(3, reason="slow")
    ours.gauge("bus_connections", "Connections.").set(7)
    ours.histogram("bus_request_seconds", "Requests.", buckets=(0.1, 1)).observe(0.5)
    for accept, kind, parse in (
        ("", "text/plain", text_string_to_metric_families),
        ("application/openmetrics-text; version=1.0.0,*/*;q=0.1", "application/openmetrics-text", None),
    ):
        content_type, text = ours.exposition(accept)
        assert content_type.startswith(kind)
        families = (parse or openmetrics_parser.text_string_to_metric_families)(text.decode())
        samples = {
            (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
        }
        assert samples[("muster_bus_dropped_messages_total", ("reason", "slow"))] == 3
        assert samples[("muster_bus_connections",)] == 7
        assert samples[("muster_bus_request_seconds_bucket", ("le", "1.0"))] == 1
        assert ("process_resident_memory_bytes",) in samples


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=junk", "\x00", "text/plain;version=9"]
)
def test_any_accept_header_gets_an_answer(accept: str) -> None:
    assert metrics.Metrics().exposition(accept)[0]


def test_domains_in_one_process_do_not_mix() -> None:
    first, other = metrics.Metrics(), metrics.Metrics()
    first.counter("x", "X.").add()
    other.counter("x", "X.").add(5)
    assert (first.value("muster_x_total"), other.value("muster_x_total")) == (1, 5)
    assert first.value("muster_nothing") == 0


def test_the_same_name_is_the_same_metric() -> None:
    ours = metrics.Metrics()
    ours.counter("x", "X.", ("reason",)).add(reason="a")
    ours.counter("x", "X.", ("reason",)).add(reason="a")
    assert ours.value("muster_x_total", reason="a") == 2
    with pytest.raises(errors.InvalidInput, match="already a Counter"):
        ours.gauge("x", "X.")
    with pytest.raises(errors.InvalidInput, match="already a Counter"):
        ours.counter("x", "X.", ("other",))


@pytest.mark.parametrize("name", ["Upper", "muster_x", "x_total", "x__y", "", "x-y", "1x"])
def test_names_follow_the_rules(name: str) -> None:
    with pytest.raises(errors.InvalidInput):
        metrics.Metrics().counter(name, "X.")


def test_wrong_labels_are_refused() -> None:
    counter = metrics.Metrics().counter("x", "X.", ("reason",))
    with pytest.raises(errors.InvalidInput, match="missing"):
        counter.add()
    with pytest.raises(errors.InvalidInput, match="labels are"):
        counter.add(reason="a", more="b")


def test_hostile_labels_cannot_fill_the_memory() -> None:
    ours = metrics.Metrics()
    counter = ours.counter("x", "X.", ("name",))
    for number in range(metrics.MAX_SERIES + 500):
        counter.add(name=f"n{number}")
    assert ours.value("muster_x_total", name="other") == 500
    counter.add(name="n1")
    assert ours.value("muster_x_total", name="n1") == 2


def test_gauges_can_be_read_from_their_source() -> None:
    ours, queue = metrics.Metrics(), [1, 2, 3]
    gauge = ours.gauge("queue_messages", "Waiting.")
    gauge.read_from(lambda: len(queue))
    queue.append(4)
    assert ours.value("muster_queue_messages") == 4


def test_importing_it_does_not_import_the_client() -> None:
    code = (
        "import sys, muster.core.telemetry.metrics, muster.core.telemetry.log;"
        " sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_pages_of_several_processes_are_one_page():
    pages = {}
    for process in ("one", "two"):
        measure = metrics.Metrics()
        measure.counter("a_things", "Things, {in} all.", ("reason",)).add(reason='a "b" } {c, d')
        measure.gauge("b_plain", "Plain.").read_from(lambda: 3)
        measure.histogram("c_seconds", "Durations.").observe(0.1)
        pages[process] = measure.exposition()[1].decode()
    merged = metrics.merge_pages({**pages, "silent": ""})
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    for text, process in ((pages[name], name) for name in pages):
        for family in text_string_to_metric_families(text):
            own = [
                (sample.name, sample.labels | {"process": process}, sample.value) for sample in family.samples
            ]
            of_all = families[family.name]
            assert (of_all.type, of_all.documentation) == (family.type, family.documentation)
            found = [(sample.name, sample.labels, sample.value) for sample in of_all.samples]
            assert [sample for sample in found if sample[1]["process"] == process] == own
    assert merged.count("# TYPE muster_b_plain ") == 1
