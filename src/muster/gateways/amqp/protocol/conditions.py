"""AMQP error conditions, chosen so that a JMS client raises the right exceptions."""

from __future__ import annotations

from typing import Final

import proton

from muster.core import errors
from muster.message import errors as message_errors

_NAMES: Final[tuple[tuple[type[errors.MusterError], str], ...]] = (
    (errors.Unauthorized, "amqp:unauthorized-access"),
    (errors.Forbidden, "amqp:unauthorized-access"),
    (errors.LimitExceeded, "amqp:resource-limit-exceeded"),
    (errors.Overloaded, "amqp:resource-limit-exceeded"),
    (message_errors.TransactionRolledBack, "amqp:transaction:rollback"),
    (message_errors.UnknownTransaction, "amqp:transaction:unknown-id"),
    (errors.NotFound, "amqp:not-found"),
    (message_errors.FormatError, "amqp:decode-error"),
    (message_errors.NotSupported, "amqp:not-implemented"),
    (message_errors.IllegalState, "amqp:resource-locked"),
    (errors.InvalidInput, "amqp:invalid-field"),
)


def name(error: errors.MusterError) -> str:
    for kind, condition in _NAMES:
        if isinstance(error, kind):
            return condition
    return "amqp:internal-error"


def condition_of(error: errors.MusterError) -> proton.Condition:
    return proton.Condition(name(error), description(error))


def description(error: errors.MusterError) -> str:
    """What is wrong, and what would be right if that is known: clients show this text only."""
    return f"{error.message} ({error.hint})" if error.hint else error.message
