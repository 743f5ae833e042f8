"""The errors of UDDI v3: each a code with a number, told as a disposition report in a SOAP fault."""

from __future__ import annotations

import enum

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import faults
from muster.gateways.uddi.model import schema


class Code(enum.Enum):
    ASSERTION_NOT_FOUND = ("E_assertionNotFound", 30000)
    AUTH_TOKEN_EXPIRED = ("E_authTokenExpired", 10110)
    AUTH_TOKEN_REQUIRED = ("E_authTokenRequired", 10120)
    BUSY = ("E_busy", 10400)
    FATAL_ERROR = ("E_fatalError", 10500)
    INVALID_COMBINATION = ("E_invalidCombination", 40500)
    INVALID_COMPLETION_STATUS = ("E_invalidCompletionStatus", 30100)
    INVALID_KEY_PASSED = ("E_invalidKeyPassed", 10210)
    INVALID_PROJECTION = ("E_invalidProjection", 20230)
    INVALID_VALUE = ("E_invalidValue", 20200)
    KEY_UNAVAILABLE = ("E_keyUnavailable", 40100)
    MESSAGE_TOO_LARGE = ("E_messageTooLarge", 30110)
    REQUEST_TIMEOUT = ("E_requestTimeout", 20240)
    RESULT_SET_TOO_LARGE = ("E_resultSetTooLarge", 40300)
    TOO_MANY_OPTIONS = ("E_tooManyOptions", 10030)
    UNKNOWN_USER = ("E_unknownUser", 10150)
    UNSUPPORTED = ("E_unsupported", 10050)
    USER_MISMATCH = ("E_userMismatch", 10140)
    VALUE_NOT_ALLOWED = ("E_valueNotAllowed", 20210)

    @property
    def word(self) -> str:
        return self.value[0]

    @property
    def number(self) -> int:
        return self.value[1]


_OURS = {Code.BUSY, Code.FATAL_ERROR, Code.REQUEST_TIMEOUT}


def fault(code: Code, message: str, *, key_type: str = "") -> faults.Fault:
    uddi = schema.UDDI
    # The report must be the very first thing in the detail: there are clients that look nowhere else.
    report = xml.Element(
        uddi("dispositionReport"),
        xml.Element(
            uddi("result"),
            xml.Element(uddi("errInfo"), f"{code.word}: {message}", attributes={"errCode": code.word}),
            attributes={"errno": str(code.number), **({"keyType": key_type} if key_type else {})},
        ),
    )
    blame = faults.Code.RECEIVER if code in _OURS else faults.Code.SENDER
    return faults.Fault(blame, message, subcode=uddi(code.word), details=[report])


def of(error: errors.MusterError) -> faults.Fault:
    """Any error of ours, in UDDI's words."""
    if isinstance(error, faults.Fault):
        return error
    said = faults.said(error)
    match error:
        case schema.Invalid():
            return fault(Code.VALUE_NOT_ALLOWED, said)
        case errors.TimedOut():
            return fault(Code.REQUEST_TIMEOUT, said)
        case errors.Unavailable():
            return fault(Code.BUSY, said)
        case errors.Forbidden():
            return fault(Code.USER_MISMATCH, said)
        case errors.LimitExceeded():
            return fault(Code.MESSAGE_TOO_LARGE, said)
        case errors.NotFound():
            return fault(Code.INVALID_KEY_PASSED, said)
        case errors.Conflict():
            return fault(Code.BUSY, f"{said}: somebody else changes the same; try again")
        case errors.InvalidInput():
            return fault(Code.VALUE_NOT_ALLOWED, said)
        case _:
            return fault(Code.FATAL_ERROR, faults.of(error).message)
