"""The wire format of errors, from a service to its caller.

The caller gets the same error. Its class is found by the code, or by the code of the nearest base class in
`muster.core.errors`, which every caller has. A caller that does not know the code still gets an error with
that code and exit status.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from muster.core import errors

TEXT_MAX = 4096  # characters of one text: a parse error has the parsed text


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``facts`` are the attributes that the error's class declares (`errors.MusterError.facts`)."""

    code: str
    kind: str = ""
    message: str
    hint: str | None = None
    exit_code: int = 1
    facts: dict[str, Any] = {}


def to_error_reply(error: errors.MusterError) -> ErrorReply:
    kind = next(base for base in type(error).__mro__ if base.__module__ == errors.__name__)
    values = {name: getattr(error, name, None) for name in type(error).facts}
    return ErrorReply(
        code=error.code,
        kind=getattr(kind, "code", ""),
        message=_text(error.message),
        hint=error.hint and _text(error.hint),
        exit_code=error.exit_code,
        facts={
            name: _text(value) if isinstance(value, str) else value
            for name, value in values.items()
            if value is not None
        },
    )


def _text(text: str) -> str:
    return errors.sendable(text[:TEXT_MAX])


def from_error_reply(fault: ErrorReply) -> errors.MusterError:
    """The error that ``fault`` describes, made without its constructor, which may need other facts."""
    kind = _class_of(fault.code) or _class_of(fault.kind) or errors.MusterError
    error = kind.__new__(kind)
    Exception.__init__(error, fault.message)
    error.message, error.hint = fault.message, fault.hint
    for name in kind.facts:
        setattr(error, name, fault.facts.get(name))
    if error.code != fault.code:
        error.code = fault.code
        error.exit_code = fault.exit_code if 0 < fault.exit_code < 256 else 1
    return error


def _class_of(code: str) -> type[errors.MusterError] | None:
    """The most general class with this code."""
    return next((kind for kind in _classes(errors.MusterError) if kind.code == code), None)


def _classes(root: type[errors.MusterError]) -> Iterator[type[errors.MusterError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _classes(kind)
