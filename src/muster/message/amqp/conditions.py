"""The AMQP conditions from which a JMS client makes the right exceptions."""

from __future__ import annotations

from typing import Final

import proton

from muster.core import errors
from muster.message import faults

_NAMES: Final[tuple[tuple[type[errors.MusterError], str], ...]] = (
    (errors.Unauthorized, "amqp:unauthorized-access"),
    (errors.Forbidden, "amqp:unauthorized-access"),
    (errors.LimitExceeded, "amqp:resource-limit-exceeded"),
    (errors.Overloaded, "amqp:resource-limit-exceeded"),
    (errors.NotFound, "amqp:not-found"),
    (faults.FormatError, "amqp:decode-error"),
    (faults.IllegalState, "amqp:resource-locked"),
    (errors.InvalidInput, "amqp:invalid-field"),
)


def of(error: errors.MusterError) -> proton.Condition:
    for kind, name in _NAMES:
        if isinstance(error, kind):
            return proton.Condition(name, error.message)
    return proton.Condition("amqp:internal-error", error.message)
