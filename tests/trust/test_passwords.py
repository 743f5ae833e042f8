import asyncio
import base64
import hashlib
import hmac
import stat

import pytest

from muster.core import errors
from muster.trust import keyring
from muster.trust.login import passwords
from muster.trust.permissions import roles
from tests.trust import servers

USER = roles.Role.USER
SECRET = "correct horse"


@pytest.fixture
def kept(tmp_path):
    return passwords.PasswordStore(tmp_path / "passwords")


def test_the_right_password_opens_and_no_other(kept, tmp_path):
    kept.set("ann", USER, SECRET)
    assert kept.check("ann", SECRET) == passwords.PasswordLogin("ann", USER)
    for name, wrong in (
        ("ann", "correct horsf"),
        ("ann", ""),
        ("bob", SECRET),
        ("../ann", SECRET),
        ("ann", "\x00"),
    ):
        with pytest.raises(errors.Unauthorized, match=r"^wrong name or password$"):
            kept.check(name, wrong)
    (path,) = (tmp_path / "passwords").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in path.read_text()


def test_a_password_expires_is_replaced_and_removed(tmp_path):
    now = 1000.0
    kept = passwords.PasswordStore(tmp_path, clock=lambda: now)
    kept.set("ann", USER, SECRET, lifetime_s=10)
    now = 1011.0
    with pytest.raises(errors.Unauthorized, match="expired"):
        kept.check("ann", SECRET)
    kept.set("ann", roles.Role.VIEWER, "another one")
    assert kept.check("ann", "another one").role is roles.Role.VIEWER
    assert kept.names() == ["ann"]
    kept.remove("ann")
    with pytest.raises(errors.NotFound):
        kept.remove("ann")


def test_each_password_of_a_name_is_later_than_the_one_before(tmp_path):
    kept = passwords.PasswordStore(tmp_path, clock=lambda: 1000.0)
    times = []
    for secret in (SECRET, "another one", SECRET):
        kept.set("ann", USER, secret)
        times.append(kept.get("ann").created_at)
    assert times == [1000, 1001, 1002]


@pytest.mark.parametrize("bad", ["short", "x" * 1025, "with a\nnew line", "with a \x07bell"])
def test_what_cannot_be_a_password(kept, bad):
    with pytest.raises(errors.InvalidInput):
        kept.set("ann", USER, bad)


def test_two_spellings_of_one_text_are_one_password(kept):
    kept.set("ann", USER, "cafe\u0301 au\u00a0lait")
    assert kept.check("ann", "caf\u00e9 au lait")


def test_the_example_of_rfc_7677():
    verifier = passwords.scram(
        b"pencil", "SCRAM-SHA-256", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), iterations=4096
    )
    message = (
        b"n=user,r=rOprNGfwEbeRWgbNEkqO,"
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,"
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    )
    proof = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    assert (
        base64.b64encode(passwords.check_scram_proof(verifier, message, proof))
        == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    )
    for wrong in (proof[:-1], proof[:-1] + b"\x00", b""):
        with pytest.raises(errors.Unauthorized):
            passwords.check_scram_proof(verifier, message, wrong)


@pytest.mark.parametrize("mechanism", passwords.MECHANISMS)
def test_a_client_that_never_sends_its_password(kept, mechanism):
    kept.set("ann", USER, SECRET, mechanisms=(mechanism,))
    verifier = kept.scram("ann", mechanism)
    algorithm = passwords.MECHANISMS[mechanism]
    salted = hashlib.pbkdf2_hmac(algorithm, SECRET.encode(), verifier.salt, verifier.iterations)
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    signature = hmac.digest(hashlib.new(algorithm, client_key).digest(), b"exchange", algorithm)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    expected = hmac.digest(hmac.digest(salted, b"Server Key", algorithm), b"exchange", algorithm)
    assert passwords.check_scram_proof(verifier, b"exchange", proof) == expected
    with pytest.raises(errors.Unauthorized):
        passwords.check_scram_proof(verifier, b"another exchange", proof)


def test_only_the_mechanisms_that_were_asked_for(kept):
    kept.set("ann", USER, SECRET)
    assert kept.get("ann").scram == ()
    for name in ("ann", "bob"):  # nothing that a proof could fit, and always the same
        verifier = kept.scram(name, "SCRAM-SHA-256")
        assert verifier == kept.scram(name, "SCRAM-SHA-256")
        fitting = passwords.scram(SECRET.encode(), "SCRAM-SHA-256", verifier.salt)
        assert verifier.stored_key != fitting.stored_key
    with pytest.raises(errors.InvalidInput, match="MD5"):
        kept.set("ann", USER, SECRET, mechanisms=("CRAM-MD5",))


# -- MQTT: the broker itself takes a bearer document as the password


def string(text: str) -> bytes:
    return len(text.encode()).to_bytes(2, "big") + text.encode()


def packet(kind: int, body: bytes) -> bytes:
    size, length = bytearray(), len(body)
    while True:
        size.append(length % 128 | (128 if length > 127 else 0))
        length //= 128
        if not length:
            return bytes([kind]) + bytes(size) + body


async def mqtt(server: servers.SignedServer, password: str, *topics: str) -> tuple[int, list[int]]:
    """The broker's code for the connection (0: accepted) and for each subscription (128: refused)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports["mqtt"])
    try:
        hello = string("MQTT") + b"\x04\xc2\x00\x3c" + string("client-1") + string("u1") + string(password)
        writer.write(packet(0x10, hello))
        accepted = (await reader.readexactly(4))[3]
        codes = []
        for number, topic in enumerate(topics if not accepted else (), start=1):
            writer.write(packet(0x82, number.to_bytes(2, "big") + string(topic) + b"\x00"))
            codes.append((await reader.readexactly(5))[4])
        return accepted, codes
    finally:
        writer.close()
        await writer.wait_closed()


async def test_an_mqtt_client_brings_its_document_as_its_password(tmp_path):
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    bearer = trust.issue("u1", USER, topics=("topic.orders.>",), bearer=True)
    signed = trust.issue("u2", USER)
    assert trust.show("u1").bearer
    async with servers.server(tmp_path, trust, mqtt={"listen": "127.0.0.1:-1"}) as server:
        assert await mqtt(server, bearer, "topic/orders/new", "topic/payroll/new") == (0, [0, 128])
        assert (await mqtt(server, signed))[0] != 0  # not a bearer's
        assert (await mqtt(server, bearer[:-4]))[0] != 0
        # Without a signature it is worth nothing elsewhere: over NATS it is not accepted.
        assert "Authorization" in await servers.knock(server, trust.credentials("u1"))


def test_no_person_gets_the_name_of_a_part_of_the_domain(tmp_path):
    logins = passwords.PasswordStore(tmp_path)
    with pytest.raises(errors.Conflict, match="'web' is the name of a part"):
        logins.set("web", roles.Role.VIEWER, "a long secret")
    logins.set("admin", roles.Role.VIEWER, "a long secret")
