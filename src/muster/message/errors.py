"""The errors of JMS, as branches of the project's error tree.

InvalidInput   ├── FormatError          a value cannot be read or set as that type
               ├── InvalidSelector      a ParseError: the text is not a selector
               └── NotSupported         an optional feature of JMS or AMQP that Muster does not have
Refused        ├── IllegalState         the object is closed or in the wrong mode
               ├── NotReadable / NotWriteable
               ├── TransactionRolledBack
               ├── InvalidClientId      used by another connection of the identity, or too long
               └── LogFull              a LimitExceeded: nothing is stored until messages are consumed
NotFound       ├── InvalidDestination
               └── UnknownTransaction   it has ended, or never began

A message larger than `message.max_message_bytes` is a `core.messages.MessageTooLarge`.
"""

from __future__ import annotations

from muster.core import errors


class FormatError(errors.InvalidInput):
    code = "message-format"


class InvalidSelector(errors.ParseError):
    code = "invalid-selector"


class NotSupported(errors.InvalidInput):
    code = "not-supported"


class IllegalState(errors.Refused):
    code = "illegal-state"


class NotReadable(errors.Refused):
    code = "message-not-readable"


class NotWriteable(errors.Refused):
    code = "message-not-writeable"


class TransactionRolledBack(errors.Refused):
    code = "transaction-rolled-back"


class InvalidClientId(errors.Refused):
    code = "invalid-client-id"


class LogFull(errors.LimitExceeded):
    code = "log-full"


class InvalidDestination(errors.NotFound):
    code = "invalid-destination"


class UnknownTransaction(errors.NotFound):
    code = "unknown-transaction"
