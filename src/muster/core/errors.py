"""The one exception tree.

The type shows the responsible side and whether a retry can help. Facts are attributes, and the cause is
chained. Errors of a library are translated into these where the library is called, so no caller catches the
classes of a driver.

    MusterError
    ├── InvalidInput        the input of the caller is invalid; the same call will fail again
    │   └── ParseError      …at this character of the text
    ├── Refused             understood, but not allowed or not possible
    │   ├── Unauthorized    the identity is unknown, expired or revoked
    │   ├── Forbidden       the identity is known, but lacks the permission
    │   ├── Conflict        the value changed since it was read (compare-and-set)
    │   ├── StaleEpoch      the caller's lease has passed to another process
    │   └── LimitExceeded   a limit (size, budget, cost) would be exceeded
    ├── NotFound
    │   └── Dropped         it existed, but is not retained any more
    ├── AlreadyExists
    ├── Unavailable         temporary: a retry may help
    │   ├── TimedOut
    │   ├── NotConnected
    │   └── Overloaded      a bounded queue is full
    │       └── Throttled   the caller sends too much; Muster's clients wait and send it again
    ├── MissingDependency   something that must be installed or started is missing
    └── InvariantViolation  a bug in Muster, with the history that led to it
"""

from __future__ import annotations

from typing import ClassVar


def sendable(text: str) -> str:
    """``text`` without lone surrogates, which come from JSON and from names of files, and which UTF-8 cannot
    encode.
    """
    return text.encode(errors="replace").decode()


class MusterError(Exception):
    """Base of all Muster errors. ``hint`` describes the remedy, if there is one."""

    code = "error"
    exit_code = 1
    facts: ClassVar[tuple[str, ...]] = ()  # attributes that travel with it over the bus

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # for tracebacks of users' programs


class InvalidInput(MusterError):
    code = "invalid-input"
    exit_code = 2


class ParseError(InvalidInput):
    """``position`` is the index in ``text`` of the invalid character."""

    code = "parse-error"
    facts = ("text", "position")

    def __init__(self, message: str, *, text: str, position: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.text = text
        self.position = position

    def pointer(self, width: int = 72) -> str:
        """Two lines: the text around the error, and a caret under the character."""
        start = max(0, self.position - width // 2)
        line = self.text[start : start + width].replace("\n", " ").replace("\t", " ")
        return f"{line}\n{' ' * (self.position - start)}^"


class Refused(MusterError):
    code = "refused"
    exit_code = 3


class Unauthorized(Refused):
    code = "unauthorized"


class Forbidden(Refused):
    code = "forbidden"


class Conflict(Refused):
    """``actual`` is the current value, if it is known."""

    code = "conflict"
    facts = ("actual",)

    def __init__(self, message: str, *, actual: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.actual = actual


class StaleEpoch(Refused):
    """``epoch`` is that of the rejected act; ``current`` is the newest epoch seen."""

    code = "stale-epoch"
    facts = ("epoch", "current")

    def __init__(self, message: str, *, epoch: int, current: int) -> None:
        super().__init__(message, hint="stop acting: another process holds the lease")
        self.epoch = epoch
        self.current = current


class LimitExceeded(Refused):
    code = "limit-exceeded"


class NotFound(MusterError):
    code = "not-found"
    exit_code = 4


class Dropped(NotFound):
    """``first`` to ``last`` were stored, and have been removed before they were read."""

    def __init__(self, message: str, *, first: int, last: int) -> None:
        super().__init__(message)
        self.first = first
        self.last = last


class AlreadyExists(MusterError):
    code = "already-exists"
    exit_code = 4


class Unavailable(MusterError):
    """``retry_after_s`` is a suggestion, when there is one."""

    code = "unavailable"
    exit_code = 5
    facts = ("retry_after_s",)

    def __init__(self, message: str, *, retry_after_s: float | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class TimedOut(Unavailable):
    code = "timed-out"


class NotConnected(Unavailable):
    code = "not-connected"


class Overloaded(Unavailable):
    code = "overloaded"


class Throttled(Overloaded):
    code = "throttled"


class MissingDependency(MusterError):
    code = "missing-part"
    exit_code = 6


class InvariantViolation(MusterError):
    """A bug."""

    code = "invariant-broken"
    exit_code = 70

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="this is a bug in Muster: please report it")
