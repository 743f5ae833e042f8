"""Counters, gauges and histograms: one small seam over the Prometheus client.

    metrics = Metrics()
    dropped = metrics.counter("bus_dropped_messages", "Messages dropped, by reason.", ("reason",))
    dropped.add(reason="slow-consumer")

There is no registry of the process: each domain has its own `Metrics` and passes it on, so that several
domains can run in one process. Names are lower-case words joined by underscores, with the unit last
(``_seconds``, ``_bytes``); the prefix ``muster_`` and, for counters, the suffix ``_total`` are added. Dropped
and refused items are counters with the label ``reason``.

A metric has at most 1,000 combinations of labels; further ones are counted together under ``other``, so that
hostile names cannot fill the memory.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from muster.core import errors

if TYPE_CHECKING:
    import prometheus_client

PREFIX = "muster_"
MAX_SERIES = 1000
OPENMETRICS = "application/openmetrics-text"
CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
DURATION_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\Z")


#: Returns values by labels.
ValueSource = Callable[[], Mapping[tuple[str, ...], float]]


class _Metric:
    """A metric with one child for each combination of labels."""

    def __init__(self, engine: Any, labels: tuple[str, ...]) -> None:
        self._engine = engine
        self._labels = labels
        self._children: dict[tuple[str, ...], Any] = {} if labels else {(): engine}

    def _child(self, labels: dict[str, str]) -> Any:
        try:
            key = tuple(labels[name] for name in self._labels)
        except KeyError as error:
            raise errors.InvalidInput(f"the label {error} is missing; labels: {self._labels}") from error
        child = self._children.get(key)
        if child is None:
            if len(labels) != len(self._labels):
                raise errors.InvalidInput(f"labels are {self._labels}, not {tuple(labels)}")
            if len(self._children) >= MAX_SERIES:
                key = ("other",) * len(self._labels)
            child = self._children[key] = self._engine.labels(*key)
        return child


M = TypeVar("M", bound=_Metric)


class Counter(_Metric):
    """Only grows."""

    def add(self, count: float = 1, /, **labels: str) -> None:
        self._child(labels).inc(count)


class Gauge(_Metric):
    """A value that increases and decreases."""

    def set(self, value: float, /, **labels: str) -> None:
        self._child(labels).set(value)

    def add(self, change: float, /, **labels: str) -> None:
        self._child(labels).inc(change)

    def read_from(self, source: Callable[[], float], /, **labels: str) -> None:
        """Call ``source`` at each exposition, in place of setting the value at each change."""
        self._child(labels).set_function(source)


class Histogram(_Metric):
    """Counts by size."""

    def observe(self, value: float, /, **labels: str) -> None:
        self._child(labels).observe(value)


class Metrics:
    """All the metrics of one domain in this process."""

    def __init__(self, *, process: bool = False) -> None:
        """``process``: also the process's own memory, CPU and open files."""
        # Imported here, not above: it costs more than a hundred milliseconds of `muster --help`.
        import prometheus_client

        self._client = prometheus_client
        self._registry: prometheus_client.CollectorRegistry = prometheus_client.CollectorRegistry()
        self._known: dict[str, tuple[type[_Metric], tuple[str, ...], _Metric]] = {}
        self._sources: set[str] = set()
        self._lock = threading.Lock()
        if process:
            prometheus_client.ProcessCollector(registry=self._registry)

    def counter(self, name: str, words: str, labels: Sequence[str] = ()) -> Counter:
        if name.endswith("_total"):
            raise errors.InvalidInput(f"{name}: _total is added to a counter's name by itself")
        return self._metric(Counter, self._client.Counter, name, words, labels)

    def gauge(self, name: str, words: str, labels: Sequence[str] = ()) -> Gauge:
        return self._metric(Gauge, self._client.Gauge, name, words, labels)

    def histogram(
        self,
        name: str,
        words: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = DURATION_BUCKETS_S,
    ) -> Histogram:
        return self._metric(Histogram, self._client.Histogram, name, words, labels, buckets=tuple(buckets))

    def counter_from(self, name: str, description: str, labels: Sequence[str], source: ValueSource) -> None:
        """A counter whose values, by labels, ``source`` returns at each exposition. It is added once."""
        from prometheus_client import metrics_core

        self._add_source(metrics_core.CounterMetricFamily, name, description, labels, source)

    def gauge_from(self, name: str, description: str, labels: Sequence[str], source: ValueSource) -> None:
        """A gauge whose values, by labels, ``source`` returns at each exposition. It is added once."""
        from prometheus_client import metrics_core

        self._add_source(metrics_core.GaugeMetricFamily, name, description, labels, source)

    def _add_source(
        self, family_type: Any, name: str, description: str, labels: Sequence[str], source: ValueSource
    ) -> None:
        from prometheus_client import registry

        class Source(registry.Collector):
            def collect(self) -> Iterator[Any]:
                family = family_type(PREFIX + name, description, labels=labels)
                for key, count in itertools.islice(source().items(), MAX_SERIES):
                    family.add_metric(key, count)
                yield family

        with self._lock:
            if name not in self._sources:
                self._sources.add(name)
                self._registry.register(Source())

    def value(self, name: str, /, **labels: str) -> float:
        """A sample's value by its full name (``muster_bus_dropped_messages_total``); 0 if there is none."""
        return self._registry.get_sample_value(name, labels) or 0.0

    def families(self) -> list[Any]:
        """All metrics with their samples, for other forms than the page's (`muster.core.telemetry.otlp`)."""
        return list(self._registry.collect())

    def exposition(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and text: OpenMetrics if the client accepts it, else the classic Prometheus text."""
        from prometheus_client import exposition
        from prometheus_client.openmetrics import exposition as openmetrics

        generate: Callable[[Any], bytes]
        if OPENMETRICS in accept:
            generate, content_type = openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST
        else:
            generate, content_type = exposition.generate_latest, exposition.CONTENT_TYPE_PLAIN_0_0_4
        return content_type, generate(self._registry)

    def _metric(
        self, kind: type[M], engine: Any, name: str, words: str, labels: Sequence[str], **more: Any
    ) -> M:
        """A second request for the same name, kind and labels returns the same metric."""
        with self._lock:
            names = tuple(labels)
            if name in self._known:
                known_kind, known_labels, metric = self._known[name]
                if (known_kind, known_labels) != (kind, names) or not isinstance(metric, kind):
                    raise errors.InvalidInput(
                        f"{name} is already a {known_kind.__name__} with labels {known_labels}"
                    )
                return metric
            if not _NAME.match(name) or name.startswith(PREFIX) or not all(map(_NAME.match, names)):
                raise errors.InvalidInput(
                    f"{name!r} {names}: lower-case words and underscores, without {PREFIX}"
                )
            metric = kind(engine(PREFIX + name, words, names, registry=self._registry, **more), names)
            self._known[name] = (kind, names, metric)
            return metric


def merge_pages(pages: Mapping[str, str]) -> str:
    """The pages of several processes, in the classic text, as one: each sample gets the label ``process``,
    and the samples of a metric stand together."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for process, page in pages.items():
        name, label, is_first = "", f'process="{process}"', False
        for line in page.splitlines():
            if line.startswith("#"):
                if (named := line.split(" ", 3)[2:3]) != [name]:
                    name = named[0] if named else ""
                    is_first = name not in heads
                if is_first:
                    heads.setdefault(name, []).append(line)
            elif line:
                head, mark, rest = line.partition("{")
                if not mark or " " in head:  # it has no labels
                    head, _, rest = line.partition(" ")
                    rest = f"}} {rest}"
                comma = "" if rest.startswith("}") else ","
                samples.setdefault(name, []).append(f"{head}{{{label}{comma}{rest}")
    lines = [line for name, rows in samples.items() for line in (*heads.get(name, ()), *rows)]
    return "".join(f"{line}\n" for line in lines)
