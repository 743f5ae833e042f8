"""The errors of JMS, in the places of the one tree where they belong.

InvalidInput   └── FormatError          a value cannot be read or set as that type
Refused        ├── IllegalState         not now: the object is closed, or the wrong mode
               ├── NotReadable / NotWriteable
               ├── TransactionRolledBack
               ├── InvalidClientId      in use by another connection of its identity, or too long
               └── LogFull              of LimitExceeded: nothing is stored until something is consumed
NotFound       └── InvalidDestination
"""

from __future__ import annotations

from muster.core import errors


class FormatError(errors.InvalidInput):
    code = "message-format"


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
