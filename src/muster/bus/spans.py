"""Spans of this process: what it did for a request, as part of a W3C trace.

    with spans.span("registry apply", spans.SpanKind.SERVER, identity="ann"):
        ...

Nothing is recorded until the process has a recorder (`muster.bus.http.telemetry_export`); a span then costs
some microseconds, and nothing otherwise. The context of a span is that of the running task, so messages that
are sent and events that are logged inside carry its ids.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

from muster.core.telemetry import otlp, trace

SpanKind = otlp.SpanKind
Recorder = Callable[[otlp.FinishedSpan], None]

_recorders: list[Recorder] = []
_NOT_RECORDED = contextlib.nullcontext()


@contextlib.contextmanager
def recorded_to(recorder: Recorder) -> Iterator[None]:
    """Pass each span that ends inside the block to ``recorder``."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


def span(name: str, kind: SpanKind, **facts: str) -> contextlib.AbstractContextManager[None]:
    """A span below that of the running task, or the first one of a new trace."""
    return _recorded(name, kind, facts) if _recorders else _NOT_RECORDED


@contextlib.contextmanager
def _recorded(name: str, kind: SpanKind, facts: Mapping[str, str]) -> Iterator[None]:
    parent = trace.current.get()
    context = parent.child(os.urandom(8)) if parent else trace.start(os.urandom(24))
    token = trace.current.set(context)
    start_ns, problem = time.time_ns(), ""
    try:
        yield
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        trace.current.reset(token)
        if context.sampled:
            parent_id = parent.span_id if parent else ""
            ended = otlp.FinishedSpan(
                context, parent_id, name, kind, start_ns, time.time_ns(), facts, problem
            )
            for recorder in _recorders:
                recorder(ended)
