"""Log events: a name and facts, not sentences.

    events = log.EventLog("bus")
    events.info("lease-lost", lease="manager-1", epoch=7)

A person at a terminal reads ``12:03:44.120 INFO    bus lease-lost lease=manager-1 epoch=7``; a program reads
one JSON object a line.  The trace that the running task works for (`muster.core.telemetry.trace`) is added to
each.  It is a thin layer on the standard library's logging: a host program that embeds Muster configures the
logger ``muster`` as any other, or calls `configure`.

An event is one line, whatever its facts contain, and a fact is truncated to 2,000 characters. The stack of an
error follows it. Clients choose how often some events happen: of one event `REPEATED` lines are written, and
the next one says how many were ``omitted``, so a client cannot displace older lines.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import msgspec

from muster.core import errors, leaky_buckets
from muster.core.telemetry import otlp, trace

ROOT = "muster"
MAX_FACT_CHARACTERS = 2000
REPEATED = leaky_buckets.BucketBudget(1_000, 0.1)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_COLOURS = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31"}
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+\Z")


class EventLog:
    """Writes the events of one part of Muster. ``bound`` facts are added to each event."""

    def __init__(self, part: str, **bound: Any) -> None:
        self.part = part
        self._bound = bound
        self._logger = logging.getLogger(f"{ROOT}.{part}")

    def bind(self, **facts: Any) -> EventLog:
        """A copy that adds these facts to every event, such as the domain or the broker."""
        return EventLog(self.part, **(self._bound | facts))

    def event(
        self,
        name: str,
        /,
        *,
        level: int = logging.INFO,
        error: BaseException | None = None,
        stack: bool = False,
        **facts: Any,
    ) -> None:
        """``error`` adds its type and message; with ``stack`` or at level ``debug`` also its stack."""
        if not self._logger.isEnabledFor(level):
            return
        if error is not None:
            facts["error"] = f"{type(error).__name__}: {error}"
        shown = error if stack or self._logger.isEnabledFor(logging.DEBUG) else None
        self._logger.log(level, name, extra={"facts": self._bound | facts}, exc_info=shown)

    def debug(self, name: str, /, **facts: Any) -> None:
        self.event(name, level=logging.DEBUG, **facts)

    def info(self, name: str, /, **facts: Any) -> None:
        self.event(name, level=logging.INFO, **facts)

    def warning(self, name: str, /, **facts: Any) -> None:
        self.event(name, level=logging.WARNING, **facts)

    def error(self, name: str, /, **facts: Any) -> None:
        self.event(name, level=logging.ERROR, **facts)


def configure(stream: TextIO, *, level: str = "info", form: str = "auto") -> Callable[[], None]:
    """Send Muster's events to ``stream``; the returned function undoes it."""
    terminal = stream.isatty()
    handler = logging.StreamHandler(stream)
    handler.addFilter(_add_trace)
    handler.addFilter(_RepetitionFilter().admit)
    text = form == "text" or (form == "auto" and terminal)
    handler.setFormatter(TextFormatter(colours=terminal) if text else JsonFormatter())
    logger = logging.getLogger(ROOT)
    before = (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[level])
    logger.propagate = False

    def undo() -> None:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        handler.close()

    return undo


def _add_trace(record: logging.LogRecord) -> bool:
    """Here, in the task that writes, and not in the formatter, which may run in another thread."""
    record.trace = trace.current.get()
    return True


class _RepetitionFilter:
    def __init__(self) -> None:
        self._buckets: leaky_buckets.LeakyBuckets[str] = leaky_buckets.LeakyBuckets(REPEATED)
        self._omitted: Counter[str] = Counter()

    def admit(self, record: logging.LogRecord) -> bool:
        event, now_s = f"{record.name} {record.msg}", time.monotonic()
        if self._buckets.wait_s(event, now_s):
            self._omitted[event] += 1
            return False
        self._buckets.add(event, now_s)
        if omitted := self._omitted.pop(event, 0):
            record.facts = {**getattr(record, "facts", {}), "omitted": omitted}
        return True


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = getattr(record, "facts", {})
    working_for: trace.TraceContext | None = getattr(record, "trace", None)
    if working_for is not None:
        facts = {**facts, "trace_id": working_for.trace_id, "span_id": working_for.span_id}
    return facts


def _bounded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_FACT_CHARACTERS else text[:MAX_FACT_CHARACTERS] + "…"


def _part(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{ROOT}.")


class TextFormatter(logging.Formatter):
    """For people."""

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = "".join(f" {name}={_quoted(value)}" for name, value in _facts(record).items())
        when = f"{clock}.{int(record.msecs):03} {record.levelname:<7}"
        line = f"{when} {_part(record)} {record.getMessage()}{facts}"
        colour = _COLOURS.get(record.levelno)
        if self._colours and colour:
            line = f"\x1b[{colour}m{line}\x1b[0m"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


def _quoted(value: Any) -> str:
    text = str(_bounded(value))
    return text if _PLAIN.match(text) else _json(_clean(text))


def _json(value: Any) -> str:
    """Remove characters that a reader may take for the end of a line, or a terminal for a command."""
    text = msgspec.json.encode(value).decode()
    return re.sub(r"[\x7f-\x9f\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


class JsonFormatter(logging.Formatter):
    """For programs: one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "part": _part(record),
            "event": record.getMessage(),
        }
        for name, value in _facts(record).items():
            event[name if name not in event else f"{name}_"] = _clean(_bounded(value))
        if record.exc_info:
            event["stack"] = _clean(self.formatException(record.exc_info))
        return _json(event)


class RecordHandler(logging.Handler):
    """Passes each event to ``add`` as an `otlp.LogEntry`."""

    def __init__(self, add: Callable[[otlp.LogEntry], None]) -> None:
        super().__init__()
        self._add = add
        self.addFilter(_add_trace)

    def emit(self, record: logging.LogRecord) -> None:
        facts = {name: _bounded(value) for name, value in _facts(record).items()}
        level = record.levelname.lower()
        self._add(
            otlp.LogEntry(
                at_ns=int(record.created * 1e9),
                severity=level if level in otlp.SEVERITIES else "error",
                text=record.getMessage(),
                trace_id=facts.pop("trace_id", ""),
                span_id=facts.pop("span_id", ""),
                facts={"part": _part(record), **facts},
            )
        )


def _clean(value: Any) -> Any:
    """A lone surrogate in a hostile name must not cost the event."""
    return errors.sendable(value) if isinstance(value, str) else value
