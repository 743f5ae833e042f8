"""The errors of UDDI v3: each has a code and a number, reported as a disposition report in a SOAP fault."""

from __future__ import annotations

import enum

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import faults
from muster.gateways.uddi.model import schema


class UddiErrorCode(enum.Enum):
    ASSERTION_NOT_FOUND = ("E_assertionNotFound", 30000)
    AUTH_TOKEN_EXPIRED = ("E_authTokenExpired", 10110)
    AUTH_TOKEN_REQUIRED = ("E_authTokenRequired", 10120)
    BUSY = ("E_busy", 10400)
    FATAL_ERROR = ("E_fatalError", 10500)
    INVALID_COMBINATION = ("E_invalidCombination", 40500)
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


_RECEIVER_CODES = {UddiErrorCode.BUSY, UddiErrorCode.FATAL_ERROR, UddiErrorCode.REQUEST_TIMEOUT}


def fault(code: UddiErrorCode, message: str, *, key_type: str = "") -> faults.SoapFault:
    uddi = schema.UDDI
    # The report must be the first element of the detail: some clients read only that.
    report = xml.XmlElement(
        uddi("dispositionReport"),
        xml.XmlElement(
            uddi("result"),
            xml.XmlElement(uddi("errInfo"), f"{code.word}: {message}", attributes={"errCode": code.word}),
            attributes={"errno": str(code.number), **({"keyType": key_type} if key_type else {})},
        ),
    )
    blame = faults.SoapFaultCode.RECEIVER if code in _RECEIVER_CODES else faults.SoapFaultCode.SENDER
    return faults.SoapFault(blame, message, subcode=uddi(code.word), details=[report])


def from_error(error: errors.MusterError) -> faults.SoapFault:
    """A Muster error as a UDDI fault."""
    if isinstance(error, faults.SoapFault):
        return error
    message = faults.public_message(error)
    match error:
        case schema.InvalidUddi():
            return fault(UddiErrorCode.VALUE_NOT_ALLOWED, message)
        case errors.TimedOut():
            return fault(UddiErrorCode.REQUEST_TIMEOUT, message)
        case errors.Unavailable():
            return fault(UddiErrorCode.BUSY, message)
        case errors.Forbidden():
            return fault(UddiErrorCode.USER_MISMATCH, message)
        case errors.LimitExceeded():
            return fault(UddiErrorCode.MESSAGE_TOO_LARGE, message)
        case errors.NotFound():
            return fault(UddiErrorCode.INVALID_KEY_PASSED, message)
        case errors.Conflict():
            return fault(UddiErrorCode.BUSY, f"{message}: another client changed the entity; try again")
        case errors.InvalidInput():
            return fault(UddiErrorCode.VALUE_NOT_ALLOWED, message)
        case _:
            return fault(UddiErrorCode.FATAL_ERROR, faults.from_error(error).message)
