"""Grants at their boundaries: moments, lengths, tiers, and whose revocations count."""

from __future__ import annotations

import dataclasses

import pytest

from muster.core import errors
from muster.trust import documents, grants
from tests.trust.test_grants import (
    CHAIN,
    DAY_S,
    HERE,
    NATIONAL,
    NOW,
    REGIONAL,
    ROOT,
    SCOPE,
    ask,
    authority,
    key,
    reason,
    revoked,
)


def detail(answer: grants.VerifiedGrant | grants.GrantRefused) -> str:
    assert isinstance(answer, grants.GrantRefused)
    return answer.detail


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (NOW - 60, None),
        (NOW - 60.1, "begins in 60 s"),
        (NOW - 100, "begins in 100 s"),
        (NOW + DAY_S + 59.9, None),
        (NOW + DAY_S + 60, "expired 60 s ago"),
        (NOW + DAY_S + 100, "expired 100 s ago"),
    ],
)
def test_a_grant_holds_a_minute_longer_on_both_sides_for_clocks_that_differ(now, expected):
    answer = ask(CHAIN, now=now)
    if expected is None:
        assert isinstance(answer, grants.VerifiedGrant)
    else:
        assert expected in detail(answer)


@pytest.mark.parametrize(("mandates", "good"), [(1, True), (7, True), (8, False)])
def test_a_chain_has_at_most_eight_documents(mandates, good):
    last = ROOT
    for number in range(mandates):
        last = authority(last, f"a{number}", 20 - number, {"_a": documents.AnyValue()})
    if good:
        chain = last.grant("controller", {"_a": 1}, tier=1, now=NOW, lifetime_s=60)
        assert isinstance(ask(chain), grants.VerifiedGrant)
    else:
        with pytest.raises(errors.Forbidden, match="1 to 8 documents, not 9"):
            last.grant("controller", {"_a": 1}, tier=1, now=NOW, lifetime_s=60)


def test_an_authority_grants_and_appoints_until_its_mandate_ends():
    brief = authority(NATIONAL, "brief", 2, {"_trust_level": documents.AnyValue()}, lifetime_s=60)

    def grant(now: float) -> tuple[str, ...]:
        return brief.grant("controller", {"_trust_level": 1}, tier=1, now=now, lifetime_s=60)

    def appoint(now: float) -> tuple[str, ...]:
        rules: dict[str, documents.Rule] = {"_trust_level": documents.AnyValue()}
        return brief.appoint(key().public, "x", tier=1, may_grant=rules, now=now, lifetime_s=60)

    for act in (grant, appoint):
        assert len(act(NOW + 59.9)) > 1
        with pytest.raises(errors.Forbidden, match="expired 0 s ago"):
            act(NOW + 60)
        with pytest.raises(errors.Forbidden, match="begins in"):
            act(NOW - 0.5)


def test_a_document_is_revoked_if_one_of_the_lists_that_count_has_it():
    serial = documents.serial_of(CHAIN[0])
    for first, second in ((REGIONAL, ROOT), (ROOT, REGIONAL)):
        lists = revoked(first.revoke([serial], number=1, now=NOW), second.revoke(["x"], number=1, now=NOW))
        assert reason(ask(CHAIN, revocations=lists)) == "revoked"
    assert not revoked().has(serial, ROOT.key.public)


def test_a_list_that_is_held_already_is_accepted_without_a_change():
    sealed = REGIONAL.revoke(["x"], number=2, now=NOW)
    state = revoked(sealed)
    assert state.accept(sealed, known={REGIONAL.key.public}) is state
    newer = state.accept(REGIONAL.revoke([], number=3, now=NOW), known={REGIONAL.key.public})
    assert newer.lists[REGIONAL.key.public].number == 3
    with pytest.raises(errors.Refused, match="a list of revocations was refused"):
        state.accept("rubbish", known={REGIONAL.key.public})


def test_without_a_scope_a_grant_and_a_mandate_have_that_of_their_authority():
    chain = REGIONAL.grant("controller", {"_trust_level": 1}, tier=1, now=NOW, lifetime_s=60)
    assert documents.open_sealed(chain[0], documents.Grant)[0].scope == SCOPE
    local = authority(REGIONAL, "local", 1, {"_trust_level": documents.AnyValue()})
    assert documents.open_sealed(local.mandates[0], documents.Mandate)[0].scope == SCOPE
    chain = ROOT.grant("controller", {"_a": 1}, tier=1, now=NOW, lifetime_s=60)
    assert documents.open_sealed(chain[0], documents.Grant)[0].scope == documents.GrantScope()


def test_times_are_whole_seconds():
    chain = ROOT.grant("controller", {"_a": 1}, tier=1, now=NOW + 0.9, lifetime_s=60)
    grant = documents.open_sealed(chain[0], documents.Grant)[0]
    assert grant.issued_at == NOW
    sealed = ROOT.revoke([], number=1, now=NOW + 0.9)
    assert documents.open_sealed(sealed, documents.RevocationList)[0].issued_at == NOW


def test_verdicts_and_authorities_are_values():
    granted = ask(CHAIN, HERE)
    refusal = ask((), HERE)
    for each in (granted, refusal, grants.Revocations(), ROOT):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, dataclasses.fields(each)[0].name, "x")
        assert not hasattr(each, "__dict__")
