"""The SASL layer of AMQP, server side: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 and ANONYMOUS.

Bytes in, bytes out; the only I/O is that of the caller's verifiers. Proton's server side does not support
passwords, so the five frames are read and written here.

    client                         server
    header            ──>
                      <──          header, mechanisms
    init              ──>
    response          ──> <──      challenge         (SCRAM, or PLAIN without an initial response)
                      <──          outcome
"""

from __future__ import annotations

import base64
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from muster.core import errors
from muster.core.telemetry import log
from muster.gateways.amqp.protocol import frames
from muster.message.amqp_format import amqp_types
from muster.trust.login import passwords
from muster.trust.permissions import roles

events = log.EventLog("message")

HEADER: Final = b"AMQP\x03\x01\x00\x00"
FRAME_MAX: Final = 4096  # a client needs no more before it is authenticated
_MECHANISMS, _INIT, _CHALLENGE, _RESPONSE, _OUTCOME = 0x40, 0x41, 0x42, 0x43, 0x44
_OK, _WRONG, _TEMPORARY = 0, 1, 4


class SaslVerifiers(Protocol):
    """The interface of `muster.trust.login.password_checker.PasswordChecker`."""

    async def check(self, name: str, password: str, address: str) -> passwords.PasswordLogin: ...
    async def scram(self, name: str, mechanism: str, address: str) -> passwords.ScramVerifier: ...
    async def prove(
        self, name: str, verifier: passwords.ScramVerifier, address: str, auth_message: bytes, proof: bytes
    ) -> tuple[passwords.PasswordLogin, bytes]: ...
    async def stands(self, login: passwords.PasswordLogin) -> bool: ...


class SaslServer:
    """The login of one client. ``login`` is set after success, ``failed`` after failure.

    ``address`` is that of the client; failures are counted by it.
    """

    def __init__(
        self,
        verifiers: SaslVerifiers | None,
        *,
        address: str = "-",
        anonymous: str | None = None,
        nonce: Callable[[], str] = lambda: secrets.token_urlsafe(18),
    ) -> None:
        self._verifiers = verifiers
        self._address = address
        self._anonymous = anonymous
        self._nonce = nonce
        self._buffer = b""
        self.greeted = False
        self._scram: _Scram | None = None
        self._mechanism: str | None = None  # that the client has chosen
        self.login: passwords.PasswordLogin | None = None
        self.failed = False

    @property
    def mechanisms(self) -> Sequence[str]:
        named = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN") if self._verifiers else ()
        return (*named, "ANONYMOUS") if self._anonymous else named

    @property
    def rest(self) -> bytes:
        """Bytes received after the login."""
        return self._buffer

    async def receive(self, data: bytes) -> bytes:
        """The bytes to reply with, also if the login has ``failed``: nothing after a frame that may not come.
        Raises `errors.InvalidInput` if the peer does not use SASL.
        """
        self._buffer += data
        reply = b""
        if not self.greeted:
            if len(self._buffer) < len(HEADER):
                return b""
            if self._buffer[:8] != HEADER:
                raise errors.InvalidInput("the peer must begin with the SASL header")
            self._buffer = self._buffer[8:]
            self.greeted = True
            reply = HEADER + _frame(_MECHANISMS, [_symbols(self.mechanisms)])
        while self.login is None and not self.failed:
            try:
                if (body := self._next()) is None:
                    break
                reply += await self._handle(*_parse(body))
            except (errors.Refused, errors.NotFound, errors.Overloaded) as error:
                self.failed = True
                outcome = _TEMPORARY if isinstance(error, errors.Overloaded) else _WRONG
                reply += _frame(_OUTCOME, [bytes((0x50, outcome))])
            except (ValueError, LookupError, struct.error) as error:
                events.info("malformed-sasl", error=error)
                self.failed = True
        return reply

    def _next(self) -> bytes | None:
        if len(self._buffer) < 8:
            return None
        size, offset, kind = struct.unpack_from(">IBB", self._buffer)
        if not 8 <= size <= FRAME_MAX or kind != 1 or offset < 2 or offset * 4 > size:
            raise ValueError(f"not a SASL frame: size {size}, type {kind}")
        if len(self._buffer) < size:
            return None
        body, self._buffer = self._buffer[offset * 4 : size], self._buffer[size:]
        return body

    async def _handle(self, code: int, fields: list[Any]) -> bytes:
        if code == _INIT and self._mechanism is None:
            mechanism, initial, *_ = (*fields, None)
            if not isinstance(mechanism, str):
                raise ValueError("an init without a mechanism")
            if mechanism not in self.mechanisms:
                raise errors.Unauthorized(f"the mechanism {mechanism!r} is not offered")
            self._mechanism = mechanism
            if mechanism == "ANONYMOUS":
                return self._succeed(passwords.PasswordLogin(self._anonymous or "", roles.Role.USER))
            if initial is None:
                return _frame(_CHALLENGE, [amqp_types.binary(b"")])
            return await self._proceed(mechanism, _decoded(initial))
        if code == _RESPONSE and self._mechanism is not None:
            return await self._proceed(self._mechanism, _decoded(fields[0]))
        raise ValueError(f"unexpected code {code:#x}")

    async def _proceed(self, mechanism: str, data: bytes) -> bytes:
        """The next message of the client's mechanism, in its init or in a response."""
        assert self._verifiers is not None
        try:
            if mechanism == "PLAIN":
                _, name, password = data.split(b"\0")
                login = await self._verifiers.check(name.decode(), password.decode(), self._address)
                return self._succeed(login)
            if self._scram is None:
                self._scram = _Scram(self._verifiers, mechanism, self._nonce(), self._address)
                return _frame(_CHALLENGE, [amqp_types.binary(await self._scram.first(data))])
            return self._succeed(*await self._scram.last(data))
        except (ValueError, LookupError) as error:
            raise errors.Unauthorized(f"not a response of {mechanism}: {error}") from error

    def _succeed(self, login: passwords.PasswordLogin, data: bytes | None = None) -> bytes:
        self.login = login
        fields = [bytes((0x50, _OK))]
        if data is not None:
            fields.append(amqp_types.binary(data))
        return _frame(_OUTCOME, fields)


class _Scram:
    """RFC 5802 without channel binding."""

    def __init__(self, verifiers: SaslVerifiers, mechanism: str, nonce: str, address: str) -> None:
        self._verifiers = verifiers
        self._mechanism = mechanism
        self._nonce = nonce
        self._address = address
        self._messages: list[bytes] = []

    async def first(self, message: bytes) -> bytes:
        binding, _, bare = message.split(b",", 2)
        if binding not in (b"n", b"y"):
            raise errors.Unauthorized("channel binding is not offered")
        self._header = message[: len(message) - len(bare)]
        parts = _attributes(bare)
        self._name = parts["n"].replace("=2C", ",").replace("=3D", "=")
        self._verifier = await self._verifiers.scram(self._name, self._mechanism, self._address)
        self._nonce = parts["r"] + self._nonce
        salt = base64.b64encode(self._verifier.salt).decode()
        reply = f"r={self._nonce},s={salt},i={self._verifier.iterations}".encode()
        self._messages = [bare, reply]
        return reply

    async def last(self, message: bytes) -> tuple[passwords.PasswordLogin, bytes]:
        without_proof, _, _ = message.rpartition(b",p=")
        parts = _attributes(message)
        if parts["r"] != self._nonce or base64.b64decode(parts["c"]) != self._header:
            raise errors.Unauthorized("the response does not match the challenge")
        auth_message = b",".join((*self._messages, without_proof))
        login, signature = await self._verifiers.prove(
            self._name, self._verifier, self._address, auth_message, base64.b64decode(parts["p"])
        )
        return login, b"v=" + base64.b64encode(signature)


def _attributes(message: bytes) -> dict[str, str]:
    attributes = {}
    for part in message.decode().split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part[:20]!r} is not an attribute")
        attributes[name] = value
    return attributes


# -- encodings of SASL frames ------------------------------------------------------------------------------


def _frame(code: int, fields: list[bytes]) -> bytes:
    body = b"\x00\x53" + bytes((code,)) + amqp_types.sequence(fields)
    return struct.pack(">IBBH", 8 + len(body), 2, 1, 0) + body


def _symbols(names: Sequence[str]) -> bytes:
    content = b"".join(bytes((len(word),)) + word.encode("ascii") for word in names)
    return b"\xf0" + struct.pack(">II", len(content) + 5, len(names)) + b"\xa3" + content


def _parse(body: bytes) -> tuple[int, list[Any]]:
    """The code of a described list, and its fields; binary ones are encoded."""
    fields, end = frames.fields(body, 3 if body[1] == 0x53 else 10)
    if end > len(body):
        raise ValueError("a list extends beyond its frame")
    return frames.code_of(body), fields


def _decoded(field: Any) -> bytes:
    if not isinstance(field, bytes) or field[0] not in (0xA0, 0xB0):
        raise ValueError("a field is not binary")
    return frames.binary_of(field)
