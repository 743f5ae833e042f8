import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.trust import jwt, nkeys

OPERATOR = nkeys.KeyPair.create(nkeys.KeyKind.OPERATOR)
ACCOUNT = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
USER = nkeys.KeyPair.create(nkeys.KeyKind.USER)
CLAIMS = jwt.UserClaims(issuer_account=ACCOUNT.public, pub=jwt.SubjectPermissions(allow=("a.>",)))


def issued(*, issued_at: int = 1000, expires_at: int = 2000) -> str:

    return jwt.issue(ACCOUNT, USER.public, "a1", CLAIMS, issued_at=issued_at, expires_at=expires_at)


def encode(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def test_the_same_claims_at_the_same_time_are_the_same_text():
    assert issued() == issued()
    assert jwt.read(issued()).jti != jwt.read(issued(issued_at=1001)).jti


def test_claims_survive_the_way():
    claims = jwt.verify(issued(), issuers=[ACCOUNT.public], now=1500)
    assert (claims.name, claims.sub, claims.iat, claims.exp) == ("a1", USER.public, 1000, 2000)
    assert isinstance(claims.nats, jwt.UserClaims)
    assert claims.nats.pub.allow == ("a.>",)


@pytest.mark.parametrize(
    ("issuers", "now", "reason"),
    [((), 1500, "not trusted"), ((ACCOUNT.public,), 2000, "expired"), ((ACCOUNT.public,), 9e9, "expired")],
)
def test_a_refusal_has_its_reason(issuers, now, reason):
    with pytest.raises(errors.Unauthorized, match=reason):
        jwt.verify(issued(), issuers=issuers, now=now)


def test_only_the_right_kind_of_key_signs_and_is_signed():
    account = jwt.AccountClaims(limits=jwt.AccountLimits())
    for signer, subject, claims in (
        (USER, USER, CLAIMS),
        (OPERATOR, USER, CLAIMS),
        (ACCOUNT, ACCOUNT, CLAIMS),
        (ACCOUNT, ACCOUNT, account),
    ):
        with pytest.raises(errors.InvalidInput):
            jwt.issue(signer, subject.public, "x", claims, issued_at=1)
    with pytest.raises(errors.InvalidInput, match="expire before"):
        issued(expires_at=1000)


def test_a_user_cannot_be_signed_by_a_user_even_if_the_signature_is_right():
    payload = json.loads(base64.urlsafe_b64decode(issued().split(".")[1] + "=="))
    payload["iss"] = USER.public
    signed = f"{issued().split('.')[0]}.{encode(json.dumps(payload).encode())}"
    with pytest.raises(errors.InvalidInput, match="account"):
        jwt.read(f"{signed}.{encode(USER.sign(signed.encode()))}")


@pytest.mark.parametrize("header", [{"typ": "JWT", "alg": "none"}, {"typ": "JWT", "alg": "HS256"}, {}, []])
def test_no_other_algorithm(header):
    signed = f"{encode(json.dumps(header).encode())}.{issued().split('.')[1]}"
    for signature in ("", encode(ACCOUNT.sign(signed.encode()))):
        with pytest.raises(errors.InvalidInput):
            jwt.read(f"{signed}.{signature}")


def test_a_document_too_large_for_a_broker_is_not_made():
    keys = {f"U{number:055}": 1 for number in range(20_000)}
    account = jwt.AccountClaims(limits=jwt.AccountLimits(), revocations=keys)
    with pytest.raises(errors.LimitExceeded):
        jwt.issue(OPERATOR, ACCOUNT.public, "x", account, issued_at=1)
    with pytest.raises(errors.InvalidInput):
        jwt.read("x" * (jwt.SIZE_MAX + 1))


@given(st.data())
def test_any_changed_character_is_refused(data):
    token = issued()
    position = data.draw(st.integers(0, len(token) - 1))
    letter = data.draw(st.characters())
    changed = token[:position] + letter + token[position + 1 :]
    if changed != token:
        with pytest.raises((errors.InvalidInput, errors.Unauthorized)):
            jwt.read(changed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(st.one_of(st.text(), st.lists(st.binary(max_size=30).map(encode), max_size=4).map(".".join)))
def test_hostile_text_gives_only_our_error(text):
    with pytest.raises(errors.InvalidInput):
        jwt.read(text)


@given(
    JSON, st.dictionaries(st.sampled_from(["jti", "iat", "iss", "name", "sub", "exp", "nbf", "nats"]), JSON)
)
def test_hostile_claims_give_only_our_error(nats, claims):
    valid = json.loads(base64.urlsafe_b64decode(issued().split(".")[1] + "=="))
    payload = encode(json.dumps(valid | {"nats": nats} | claims).encode())
    with pytest.raises((errors.InvalidInput, errors.Unauthorized)):
        jwt.read(f"{issued().split('.')[0]}.{payload}.{issued().split('.')[2]}")


def test_deeply_nested_claims_give_only_our_error():
    payload = encode(b'{"nats":' + b"[" * 100_000)
    with pytest.raises(errors.InvalidInput):
        jwt.read(f"{issued().split('.')[0]}.{payload}.{issued().split('.')[2]}")
