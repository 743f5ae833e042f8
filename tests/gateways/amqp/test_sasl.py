"""The gateway's login: each mechanism with a right and a wrong password."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct

import pytest

from muster.core import errors
from muster.gateways.amqp.protocol import sasl
from muster.message.amqp_format import amqp_types
from muster.trust.login import password_checker, passwords, throttle
from muster.trust.permissions import roles

NAME, WORD = "ann", "correct horse"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> passwords.PasswordStore:
    made = passwords.PasswordStore(tmp_path_factory.mktemp("passwords"))
    made.set(NAME, roles.Role.USER, WORD, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    return made


@pytest.fixture
def verifiers(known: passwords.PasswordStore) -> password_checker.PasswordChecker:
    return password_checker.PasswordChecker(known)


def _init(mechanism: str, initial: bytes) -> bytes:
    name = mechanism.encode()
    return sasl._frame(0x41, [b"\xa3" + bytes([len(name)]) + name, amqp_types.binary(initial)])


def _said(answer: bytes) -> tuple[int, list[bytes | None]]:
    """The code of the last frame, and its fields as far as they are bytes; an outcome's first is its code."""
    reply: tuple[int, list[bytes | None]] = (0, [])
    at = 8 if answer[:4] == b"AMQP" else 0
    while at < len(answer):
        size = struct.unpack_from(">I", answer, at)[0]
        body = answer[at + 8 : at + size]
        if body[2] in (0x42, 0x44):
            code, fields = sasl._parse(body)
            decoded = [bytes((each,)) if isinstance(each, int) else sasl._decoded(each) for each in fields]
            reply = (code, [*decoded, None][:2])
        at += size
    return reply


def _attribute(text: bytes, name: str) -> str:
    return next(part[2:] for part in text.decode().split(",") if part.startswith(f"{name}="))


async def _scram(server: sasl.SaslServer, mechanism: str, password: str, name: str = NAME) -> bool:
    """A client's side of it; True if both sides have proved that they know the password."""
    algorithm = mechanism.removeprefix("SCRAM-").replace("-", "").lower()
    bare = f"n={name},r=clients-nonce"
    _, (first, *_) = _said(await server.receive(sasl.HEADER + _init(mechanism, b"n,," + bare.encode())))
    assert first is not None
    salt = base64.b64decode(_attribute(first, "s"))
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), salt, int(_attribute(first, "i")))
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    stored = hashlib.new(algorithm, client_key).digest()
    without = f"c={base64.b64encode(b'n,,').decode()},r={_attribute(first, 'r')}"
    signed = f"{bare},{first.decode()},{without}".encode()
    proof = bytes(a ^ b for a, b in zip(client_key, hmac.digest(stored, signed, algorithm), strict=True))
    answer = f"{without},p={base64.b64encode(proof).decode()}".encode()
    code, (outcome, data) = _said(await server.receive(sasl._frame(0x43, [amqp_types.binary(answer)])))
    assert code == 0x44
    if outcome != b"\x00":
        return False
    server_key = hmac.digest(salted, b"Server Key", algorithm)
    expected = b"v=" + base64.b64encode(hmac.digest(server_key, signed, algorithm))
    return data is not None and data.endswith(expected)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_scram(verifiers: password_checker.PasswordChecker, mechanism: str):
    server = sasl.SaslServer(verifiers)
    assert await _scram(server, mechanism, WORD)
    assert server.login is not None
    assert server.login.name == NAME
    wrong = sasl.SaslServer(verifiers)
    assert not await _scram(wrong, mechanism, "incorrect horse")
    assert wrong.failed
    assert wrong.login is None


@pytest.mark.parametrize(("password", "let_in"), [(WORD, True), ("wrong", False)])
async def test_plain(verifiers: password_checker.PasswordChecker, password: str, let_in: bool):
    server = sasl.SaslServer(verifiers)
    await server.receive(sasl.HEADER + _init("PLAIN", f"\0{NAME}\0{password}".encode()))
    assert (server.login is not None, server.failed) == (let_in, not let_in)


@pytest.mark.parametrize("anonymous", [None, "visitor"])
async def test_anonymous_only_where_it_is_allowed(
    verifiers: password_checker.PasswordChecker, anonymous: str | None
):
    server = sasl.SaslServer(verifiers, anonymous=anonymous)
    await server.receive(sasl.HEADER + _init("ANONYMOUS", b""))
    assert (server.login.name if server.login else None) == anonymous
    assert server.failed == (anonymous is None)


async def test_a_client_without_sasl_gets_the_sasl_header(verifiers: password_checker.PasswordChecker):
    with pytest.raises(errors.InvalidInput):
        await sasl.SaslServer(verifiers).receive(b"AMQP\x00\x01\x00\x00")


@pytest.mark.parametrize(
    "sent_bytes",
    [
        pytest.param(b"\x00\x00\x00\x04\x02\x01\x00\x00", id="a size below that of a header"),
        pytest.param(b"\x00\x00\x20\x00\x02\x01\x00\x00", id="a frame that is too large"),
        pytest.param(b"\x00\x00\x00\x08\x02\x00\x00\x00", id="a frame of AMQP"),
        pytest.param(b"\x00\x00\x00\x08\x02\x01\x00\x00", id="a frame without a body"),
        pytest.param(sasl._frame(0x40, [sasl._symbols(["ANONYMOUS"])]), id="mechanisms"),
        pytest.param(sasl._frame(0x42, [amqp_types.binary(b"x")]), id="a challenge"),
        pytest.param(sasl._frame(0x43, [amqp_types.binary(b"x")]), id="a response before the init"),
        pytest.param(sasl._frame(0x44, [b"\x50\x00"]), id="an outcome"),
        pytest.param(sasl._frame(0x41, []), id="an init without a mechanism"),
        pytest.param(_init("ANONYMOUS", b"")[:-1] + b"\x41", id="an init with a boolean"),
    ],
)
async def test_5_3_a_frame_that_may_not_come_ends_the_connection(
    verifiers: password_checker.PasswordChecker, sent_bytes: bytes
):
    """The error is irrecoverable: nothing answers it."""
    server = sasl.SaslServer(verifiers, anonymous="visitor")
    answer = await server.receive(sasl.HEADER + sent_bytes)
    assert answer == sasl.HEADER + sasl._frame(0x40, [sasl._symbols(server.mechanisms)])
    assert (server.failed, server.login) == (True, None)


async def test_5_3_a_second_init_ends_the_connection(verifiers: password_checker.PasswordChecker):
    server = sasl.SaslServer(verifiers, anonymous="visitor")
    challenge = await server.receive(sasl.HEADER + _init("SCRAM-SHA-256", b"n,,n=ann,r=x"))
    assert await server.receive(_init("ANONYMOUS", b"")) == b""
    assert (b"\x53\x42" in challenge, server.failed, server.login) == (True, True, None)


async def test_5_3_3_a_malformed_initial_response_is_wrong(verifiers: password_checker.PasswordChecker):
    server = sasl.SaslServer(verifiers)
    answer = await server.receive(sasl.HEADER + _init("PLAIN", b"ann"))
    assert answer.endswith(sasl._frame(0x44, [b"\x50\x01"]))
    assert server.failed


async def test_5_3_3_plain_without_an_initial_response_is_challenged(
    verifiers: password_checker.PasswordChecker,
):
    server = sasl.SaslServer(verifiers)
    answer = await server.receive(sasl.HEADER + sasl._frame(0x41, [b"\xa3\x05PLAIN"]))
    assert answer.endswith(sasl._frame(0x42, [amqp_types.binary(b"")]))
    await server.receive(sasl._frame(0x43, [amqp_types.binary(f"\0ann\0{WORD}".encode())]))
    assert server.login is not None
    assert server.login.name == "ann"


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_scram_does_not_tell_which_accounts_exist(known: passwords.PasswordStore, mechanism: str):
    known.set("plain-only", roles.Role.USER, WORD)

    async def challenge(name: str) -> dict[str, str]:
        server = sasl.SaslServer(password_checker.PasswordChecker(passwords.PasswordStore(known._folder)))
        _, (first, *_) = _said(
            await server.receive(sasl.HEADER + _init(mechanism, f"n,,n={name},r=clients-nonce".encode()))
        )
        assert first is not None
        assert not server.failed
        return {key: _attribute(first, key) for key in "si"}

    real, unknown = await challenge(NAME), await challenge("eve")
    assert unknown["i"] == real["i"]
    assert len(unknown["s"]) == len(real["s"])
    assert await challenge("eve") == unknown  # in each process: a second attempt must not differ
    assert (await challenge("plain-only"))["s"] not in (real["s"], unknown["s"])
    assert not await _scram(sasl.SaslServer(password_checker.PasswordChecker(known)), mechanism, WORD, "eve")
    assert not await _scram(
        sasl.SaslServer(password_checker.PasswordChecker(known)), mechanism, WORD, "plain-only"
    )


async def test_plain_and_scram_share_one_throttle(verifiers: password_checker.PasswordChecker):
    for number in range(throttle.LoginBudgets().pair.at_once):
        wrong = sasl.SaslServer(verifiers, address="10.0.0.1")
        if number % 2:
            assert not await _scram(wrong, "SCRAM-SHA-256", "incorrect horse")
        else:
            await wrong.receive(sasl.HEADER + _init("PLAIN", f"\0{NAME}\0wrong".encode()))
        assert wrong.failed
    for mechanism, initial in (
        ("PLAIN", f"\0{NAME}\0{WORD}"),
        ("SCRAM-SHA-256", f"n,,n={NAME},r=clients-nonce"),
    ):
        right = sasl.SaslServer(verifiers, address="10.0.0.1")
        code, (outcome, *_) = _said(await right.receive(sasl.HEADER + _init(mechanism, initial.encode())))
        assert (code, outcome) == (0x44, b"\x04")  # sys-temp: not wrong, but not now
    elsewhere = sasl.SaslServer(verifiers, address="10.0.0.2")
    assert await _scram(elsewhere, "SCRAM-SHA-256", WORD)


@pytest.mark.parametrize("message", ["n,,r=x", "n,,n=ann", "n,,", "", "p=x,,n=ann,r=x"])
async def test_a_malformed_first_message_of_scram_is_answered_with_its_error(
    verifiers: password_checker.PasswordChecker, message: str
):
    server = sasl.SaslServer(verifiers)
    await server.receive(sasl.HEADER + _init("SCRAM-SHA-256", message.encode()))
    assert server.failed
