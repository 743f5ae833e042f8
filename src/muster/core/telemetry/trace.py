"""W3C trace context in message headers: which request a message belongs to, across processes.

``traceparent`` has the trace id, the span id and flags; ``tracestate`` has the data of other tracing systems.
A malformed header is ignored and counted, and the message is delivered without it. Ids are made from random
bytes that the caller passes.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from muster.core import errors

PARENT_HEADER = "traceparent"
STATE_HEADER = "tracestate"
MAX_STATE_CHARACTERS = 512
MAX_STATE_MEMBERS = 32

SAMPLED = 0x01
_RANDOM_ID = 0x02  # the trace's id is random: passed on as received
_KNOWN_FLAGS = SAMPLED | _RANDOM_ID

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]\Z"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A position in a trace. ``span_id`` is that of its owner; in a message it is that of the sender."""

    trace_id: str
    span_id: str
    flags: int = SAMPLED
    state: str = ""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def parent(self) -> str:
        """The ``traceparent`` header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def child(self, random: bytes) -> TraceContext:
        """The next span of the same trace; ``random`` is 8 bytes."""
        return replace(self, span_id=_id(random, 8))


#: The trace that the running task works for; log events carry it.
current: contextvars.ContextVar[TraceContext | None] = contextvars.ContextVar("muster_trace", default=None)


def start(random: bytes, *, sampled: bool = True) -> TraceContext:
    """A new trace; ``random`` is 24 bytes."""
    if len(random) != 24:
        raise errors.InvalidInput(f"a new trace needs 24 random bytes, not {len(random)}")
    return TraceContext(_id(random[:16], 16), _id(random[16:], 8), _RANDOM_ID | (SAMPLED if sampled else 0))


def inject(trace: TraceContext, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """``headers`` with the trace in them, in place of any that was there."""
    kept = {name: value for name, value in (headers or {}).items() if name.lower() not in _HEADERS}
    kept[PARENT_HEADER] = trace.parent
    if trace.state:
        kept[STATE_HEADER] = trace.state
    return kept


def extract(
    headers: Mapping[str, str], on_malformed: Callable[[str], None] | None = None
) -> TraceContext | None:
    """The trace of a message, or None. ``on_malformed`` is called with the name of an ignored header."""
    fields = {name.lower(): value for name, value in headers.items() if name.lower() in _HEADERS}
    if PARENT_HEADER not in fields:
        return None
    trace = _parse_parent(fields[PARENT_HEADER])
    if trace is None:
        if on_malformed:
            on_malformed(PARENT_HEADER)
        return None
    state = _parse_state(fields.get(STATE_HEADER, ""))
    if state is None:
        if on_malformed:
            on_malformed(STATE_HEADER)
        return trace
    return replace(trace, state=state)


_HEADERS = (PARENT_HEADER, STATE_HEADER)


def _id(random: bytes, size: int) -> str:
    if len(random) != size:
        raise errors.InvalidInput(f"an id is made from {size} random bytes, not {len(random)}")
    return random.hex() if any(random) else "0" * (2 * size - 1) + "1"  # all zeros: no id


def _parse_parent(text: str) -> TraceContext | None:
    match = _PARENT.match(text.strip(" \t"))
    if not match:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    # A later version may add to the end, and is then read as this one; version ff will never be.
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16) & _KNOWN_FLAGS)


def _parse_state(text: str) -> str | None:
    """The state in its plain form, empty if there is none, None if it is malformed."""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    if len(text) > 2 * MAX_STATE_CHARACTERS or len(members) > MAX_STATE_MEMBERS or len(keys) != len(members):
        return None
    if not all(map(_MEMBER.match, members)):
        return None
    # Complete members are removed from the end, where the oldest are, until the rest is short enough.
    while len(",".join(members)) > MAX_STATE_CHARACTERS:
        members.pop()
    return ",".join(members)
