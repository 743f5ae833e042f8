import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.core.formats import base64url
from muster.trust import documents, grants, keyring, nkeys

NOW = 1_800_000_000
DAY_S = 86400
NOBODY = grants.Revocations()
HERE = documents.GrantSituation(
    holder="controller",
    domain="earth/north",
    region="northwest/coast",
    participant="fire.7",
    audience="web-1",
)


def key() -> nkeys.KeyPair:
    return nkeys.KeyPair.create(nkeys.KeyKind.USER)


ROOT = grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT))


def authority(
    above: grants.Authority,
    name: str,
    tier: int,
    rules: dict[str, documents.Rule],
    scope: documents.GrantScope | None = None,
    lifetime_s: float = 365 * DAY_S,
) -> grants.Authority:
    own = key()
    mandates = above.appoint(
        own.public, name, tier=tier, may_grant=rules, now=NOW, lifetime_s=lifetime_s, scope=scope
    )
    return grants.Authority(own, mandates)


def unchecked(signer: nkeys.KeyPair, above: tuple[str, ...], **changes: object) -> tuple[str, ...]:
    """A grant that its signer made without a check of its rights."""
    words = {
        "issuer": signer.public,
        "holder": "controller",
        "tier": 1,
        "attributes": {"_trust_level": 2},
        "issued_at": NOW,
        "expires_at": NOW + DAY_S,
    }
    return (documents.seal(signer, documents.Grant(**(words | changes))), *above)  # type: ignore[arg-type]


# The paper's example: regions of command and levels of trust, assigned by third parties.
NATIONAL = authority(
    ROOT,
    "national",
    3,
    {
        "_command_region": documents.AnyValue(),
        "_trust_level": documents.ValueRange(low=0, high=5),
        "_services": documents.ValueIn(values=("docs", "cgi", "xml")),
    },
)
REGIONAL = authority(
    NATIONAL,
    "regional",
    2,
    {
        "_command_region": documents.ValuePrefix(text="northwest"),
        "_trust_level": documents.ValueRange(low=0, high=4),
        "_services": documents.ValueIn(
            values=("docs", "cgi", "php")
        ),  # php is not the national one's to give
    },
    documents.GrantScope(domain="earth/north", region="northwest"),
)
SCOPE = documents.GrantScope(domain="earth/north", region="northwest")
CHAIN = REGIONAL.grant(
    "controller", {"_command_region": "northwest", "_trust_level": 4}, tier=2, now=NOW, lifetime_s=DAY_S
)


def ask(
    chain: tuple[str, ...],
    situation: documents.GrantSituation = HERE,
    *,
    now: float = NOW + 10,
    revocations: grants.Revocations = NOBODY,
    root: str = ROOT.key.public,
    lifetime_s_max: float | None = None,
) -> grants.VerifiedGrant | grants.GrantRefused:
    return grants.verify(
        chain, situation, root=root, now=now, revocations=revocations, lifetime_s_max=lifetime_s_max
    )


def reason(answer: grants.VerifiedGrant | grants.GrantRefused) -> str:
    assert isinstance(answer, grants.GrantRefused), answer
    assert answer.detail
    return answer.reason.value


def elsewhere(**changes: str) -> documents.GrantSituation:
    words = {name: getattr(HERE, name) for name in ("holder", "domain", "region", "participant", "audience")}
    return documents.GrantSituation(**(words | changes))


def test_a_grant_gives_its_attributes():
    answer = ask(CHAIN)
    assert isinstance(answer, grants.VerifiedGrant)
    assert answer.attributes == {"_command_region": "northwest", "_trust_level": 4}
    assert (answer.holder, answer.tier, answer.authority) == ("controller", 2, "regional")
    assert answer.expires_at == NOW + DAY_S
    assert answer.serial == documents.serial_of(CHAIN[0])


def test_the_root_grants_without_a_mandate():
    answer = ask(ROOT.grant("controller", {"_x": True}, tier=99, now=NOW, lifetime_s=60))
    assert isinstance(answer, grants.VerifiedGrant)
    assert answer.authority == ""


def test_the_same_words_are_the_same_bytes():
    words: dict[str, documents.Value] = {"_b": 1, "_a": ("x", "y")}
    first = ROOT.grant("controller", words, tier=1, now=NOW, lifetime_s=60)
    assert first == ROOT.grant(
        "controller", dict(reversed(list(words.items()))), tier=1, now=NOW, lifetime_s=60
    )


def test_what_is_granted_ends_with_the_first_document_that_ends():
    brief = authority(NATIONAL, "brief", 1, {"_trust_level": documents.AnyValue()}, lifetime_s=60)
    answer = ask(brief.grant("controller", {"_trust_level": 1}, tier=1, now=NOW, lifetime_s=DAY_S))
    assert isinstance(answer, grants.VerifiedGrant)
    assert answer.expires_at == NOW + 60


# -- refusals, each with its reason


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (NOW - 61, "not-yet-valid"),
        (NOW + DAY_S + 61, "expired"),
        (NOW + 400 * DAY_S, "expired"),
    ],
)
def test_time(now, expected):
    assert reason(ask(CHAIN, now=now)) == expected


@pytest.mark.parametrize("now", [NOW - 59, NOW + DAY_S + 59])
def test_clocks_may_differ_a_little(now):
    assert isinstance(ask(CHAIN, now=now), grants.VerifiedGrant)


def test_an_expired_mandate_takes_its_grants_with_it():
    brief = authority(NATIONAL, "brief", 1, {"_trust_level": documents.AnyValue()}, lifetime_s=60)
    chain = brief.grant("controller", {"_trust_level": 1}, tier=1, now=NOW, lifetime_s=DAY_S)
    assert reason(ask(chain, now=NOW + 200)) == "expired"


def test_a_grant_may_not_outlive_the_maximum_age_of_revocations():
    assert reason(ask(CHAIN, lifetime_s_max=DAY_S - 1)) == "too-long-lived"
    assert isinstance(ask(CHAIN, lifetime_s_max=DAY_S), grants.VerifiedGrant)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"holder": "other"}, "other-holder"),
        ({"domain": "earth/south"}, "out-of-scope"),
        ({"domain": "earth/northern"}, "out-of-scope"),  # a path is cut at its separators
        ({"domain": "earth"}, "out-of-scope"),
        ({"region": "southwest"}, "out-of-scope"),
    ],
)
def test_the_scope_and_the_holder_of_a_grant_are_checked(change, expected):
    assert reason(ask(CHAIN, elsewhere(**change))) == expected
    assert isinstance(ask(CHAIN, elsewhere(domain="earth/north/oslo")), grants.VerifiedGrant)


def test_parties_and_audiences():
    scope = documents.GrantScope(
        domain="earth/north", region="northwest", prefix="fire", audience=("web-1", "web-2")
    )
    chain = REGIONAL.grant("controller", {"_trust_level": 1}, tier=1, now=NOW, lifetime_s=60, scope=scope)
    assert isinstance(ask(chain), grants.VerifiedGrant)
    assert reason(ask(chain, elsewhere(participant="flood.1"))) == "out-of-scope"
    assert reason(ask(chain, elsewhere(participant=""))) == "out-of-scope"
    assert reason(ask(chain, elsewhere(audience="web-3"))) == "out-of-scope"


BEYOND = [
    ({"tier": 3}, "beyond-tier"),
    ({"attributes": {"_trust_level": 5}}, "beyond-mandate"),  # the national one may, the regional one may not
    ({"attributes": {"_trust_level": -1}}, "beyond-mandate"),
    ({"attributes": {"_trust_level": True}}, "beyond-mandate"),  # not a number, whatever Python thinks
    ({"attributes": {"_trust_level": "4"}}, "beyond-mandate"),
    ({"attributes": {"_command_region": "southwest"}}, "beyond-mandate"),
    ({"attributes": {"_services": ("docs", "php")}}, "beyond-mandate"),  # allowed by one, not by both
    ({"attributes": {"_services": ("docs", "xml")}}, "beyond-mandate"),
    ({"attributes": {"_admin": True}}, "beyond-mandate"),
    ({"attributes": {"_trust_level": 1, "_admin": True}}, "beyond-mandate"),
    ({"scope": documents.GrantScope()}, "out-of-scope"),
    ({"scope": documents.GrantScope(domain="earth", region="northwest")}, "out-of-scope"),
    ({"scope": documents.GrantScope(domain="earth/north", region="north")}, "out-of-scope"),
]


@pytest.mark.parametrize(("change", "expected"), BEYOND)
def test_an_authority_cannot_grant_beyond_its_own(change, expected):
    words = {"scope": SCOPE} | change
    assert reason(ask(unchecked(REGIONAL.key, REGIONAL.mandates, **words))) == expected
    # A later attempt is refused with this reason.
    grant_fields = {"attributes": {"_trust_level": 2}, "tier": 1} | words
    with pytest.raises(errors.Forbidden):
        REGIONAL.grant("controller", grant_fields.pop("attributes"), now=NOW, lifetime_s=60, **grant_fields)


def test_a_set_is_allowed_if_every_member_is():
    chain = REGIONAL.grant("controller", {"_services": ("docs", "cgi")}, tier=1, now=NOW, lifetime_s=60)
    assert isinstance(ask(chain), grants.VerifiedGrant)


def test_an_authority_cannot_appoint_its_equal_or_better():
    rules: dict[str, documents.Rule] = {"_trust_level": documents.AnyValue()}
    for tier in (2, 3, 99):
        with pytest.raises(errors.Forbidden, match="tier"):
            authority(REGIONAL, "friend", tier, rules, SCOPE)
        own = key()
        forged = documents.Mandate(
            issuer=REGIONAL.key.public,
            subject=own.public,
            name="friend",
            tier=tier,
            may_grant=rules,
            scope=SCOPE,
            issued_at=NOW,
            expires_at=NOW + DAY_S,
        )
        above = (documents.seal(REGIONAL.key, forged), *REGIONAL.mandates)
        assert reason(ask(unchecked(own, above, scope=SCOPE))) == "beyond-tier"


def test_a_mandate_for_more_than_its_signer_has_gives_no_more():
    local = authority(REGIONAL, "local", 1, {"_trust_level": documents.AnyValue()}, SCOPE)
    assert isinstance(
        ask(local.grant("controller", {"_trust_level": 4}, tier=1, now=NOW, lifetime_s=60)),
        grants.VerifiedGrant,
    )
    chain = unchecked(local.key, local.mandates, attributes={"_trust_level": 5}, scope=SCOPE)
    assert reason(ask(chain)) == "beyond-mandate"


def test_no_authority_appoints_itself():
    own = key()
    rules: dict[str, documents.Rule] = {"_trust_level": documents.AnyValue()}
    alone = grants.Authority(own)
    mandates = alone.appoint(own.public, "me", tier=9, may_grant=rules, now=NOW, lifetime_s=60)
    assert reason(ask(unchecked(own, mandates))) == "unknown-authority"
    assert reason(ask(unchecked(own, ()))) == "unknown-authority"
    # Another identity's chain is refused as well, and so is a part of a chain.
    assert reason(ask(unchecked(own, REGIONAL.mandates))) == "unknown-authority"
    assert reason(ask(unchecked(REGIONAL.key, REGIONAL.mandates[:1], scope=SCOPE))) == "unknown-authority"
    assert reason(ask(unchecked(NATIONAL.key, REGIONAL.mandates))) == "unknown-authority"
    shuffled = (CHAIN[0], *reversed(CHAIN[1:]))
    assert reason(ask(shuffled)) in {"unknown-authority", "beyond-tier"}
    assert reason(ask(CHAIN, root=key().public)) == "unknown-authority"


def test_one_kind_of_document_never_passes_as_another():
    assert reason(ask((CHAIN[1], *CHAIN[1:]))) == "malformed"
    assert reason(ask((CHAIN[0], CHAIN[0], *CHAIN[1:]))) == "malformed"
    relabelled = CHAIN[1].replace("muster-mandate-1", "muster-grant-1")
    assert reason(ask((relabelled, *CHAIN[1:]))) in {"malformed", "bad-signature"}
    listed = ROOT.revoke(["x"], number=1, now=NOW).replace("muster-revocations-1", "muster-grant-1")
    assert reason(ask((listed,))) in {"malformed", "bad-signature"}


def test_chains_and_documents_have_a_size():
    assert reason(ask(())) == "too-large"
    assert reason(ask((CHAIN[0], *CHAIN[1:] * 5))) == "too-large"
    assert reason(ask(("muster-grant-1." + "A" * documents.SIZE_MAX,))) == "too-large"
    with pytest.raises(errors.InvalidInput):
        ROOT.grant("c", {f"_a{n}": "x" * 1000 for n in range(50)}, tier=1, now=NOW, lifetime_s=60)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"trust": 1},  # not a restricted attribute
        {"_": 1},
        {"_a b": 1},
        {"_a\n": 1},
        {"_a": float("nan")},
        {"_a": float("inf")},
        {"_a": 2**60},
        {"_a": None},
        {"_a": {"b": 1}},
        {"_a": ()},
        {"_a": "x" * 1025},
        {f"_a{n}": 1 for n in range(65)},
    ],
)
def test_what_cannot_be_granted(attributes):
    with pytest.raises(errors.InvalidInput):
        ROOT.grant("controller", attributes, tier=1, now=NOW, lifetime_s=60)


@pytest.mark.parametrize(("tier", "holder"), [(0, "c"), (100, "c"), (1, ""), (1, "x" * 129)])
def test_tiers_and_holders_have_bounds(tier, holder):
    with pytest.raises(errors.InvalidInput):
        ROOT.grant(holder, {"_a": 1}, tier=tier, now=NOW, lifetime_s=60)


# -- revocation


def revoked(*lists: str) -> grants.Revocations:
    known = {ROOT.key.public, NATIONAL.key.public, REGIONAL.key.public}
    state = NOBODY
    for sealed in lists:
        state = state.accept(sealed, known=known)
    return state


@pytest.mark.parametrize("position", [0, 1, 2])
def test_any_document_of_the_chain_can_be_revoked_by_its_signer_or_the_root(position):
    signer = (REGIONAL, NATIONAL, ROOT)[position]
    serial = documents.serial_of(CHAIN[position])
    for who in (signer, ROOT):
        state = revoked(who.revoke([serial], number=1, now=NOW))
        assert reason(ask(CHAIN, revocations=state)) == "revoked"
    # Others' lists do not count, and other serials do not either.
    others = {REGIONAL: NATIONAL, NATIONAL: REGIONAL, ROOT: NATIONAL}
    state = revoked(others[signer].revoke([serial], number=1, now=NOW))
    assert isinstance(ask(CHAIN, revocations=state), grants.VerifiedGrant)
    state = revoked(signer.revoke(["something-else"], number=1, now=NOW))
    assert isinstance(ask(CHAIN, revocations=state), grants.VerifiedGrant)


def test_an_old_list_never_replaces_a_newer_one():
    serial = documents.serial_of(CHAIN[0])
    old, new = REGIONAL.revoke([], number=1, now=NOW), REGIONAL.revoke([serial], number=2, now=NOW)
    state = revoked(old, new, new)
    assert reason(ask(CHAIN, revocations=state)) == "revoked"
    for sealed in (old, REGIONAL.revoke([], number=2, now=NOW + 5)):
        with pytest.raises(errors.Refused, match="old"):
            state.accept(sealed, known={REGIONAL.key.public})
    stranger = grants.Authority(key())
    with pytest.raises(errors.Refused, match="no authority"):
        state.accept(stranger.revoke([serial], number=9, now=NOW), known={REGIONAL.key.public})


def test_a_large_list_is_read_and_a_huge_one_refused():
    serials = [f"{number:024}" for number in range(20_000)]
    assert revoked(ROOT.revoke(serials, number=1, now=NOW)).has(serials[7], ROOT.key.public)
    with pytest.raises(errors.InvalidInput):
        ROOT.revoke([f"{number:064}" for number in range(20_000)], number=2, now=NOW)


def test_a_list_ends_because_what_is_over_needs_no_revocation():
    serials: set[str] = set()
    sealed, day = "", 0
    for day in range(400):  # a grant for a day is revoked each hour
        ends = documents.open_sealed(sealed, documents.RevocationList)[0].ends if sealed else {}
        new = {f"{day:02}-{hour:02}": NOW + (day + 1) * DAY_S for hour in range(24)}
        serials |= new.keys()
        sealed = ROOT.revoke(serials, number=day + 1, now=NOW + day * DAY_S, ends={**ends, **new})
        serials = set(documents.open_sealed(sealed, documents.RevocationList)[0].serials)
    # those that end now are kept until they have ended for clocks that are behind
    assert serials == {f"{last:02}-{hour:02}" for last in (day - 1, day) for hour in range(24)}
    without = ROOT.revoke(["unseen"], number=day + 2, now=NOW + day * DAY_S)
    assert documents.open_sealed(without, documents.RevocationList)[0].serials == {"unseen"}


# -- hostile input


@given(st.data())
def test_any_changed_character_is_refused(data):
    which = data.draw(st.integers(0, len(CHAIN) - 1))
    text = CHAIN[which]
    position = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.one_of(st.sampled_from("AQgw-_.="), st.characters()))
    changed = text[:position] + letter + text[position + 1 :]
    if changed != text:
        assert reason(ask((*CHAIN[:which], changed, *CHAIN[which + 1 :]))) in {"malformed", "bad-signature"}


@given(st.data())
def test_any_changed_bit_of_the_content_is_refused(data):
    word, body, signature = CHAIN[0].split(".")
    raw = bytearray(base64url.decode(body))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = f"{word}.{base64url.encode(bytes(raw))}.{signature}"
    assert reason(ask((changed, *CHAIN[1:]))) in {"malformed", "bad-signature"}


PIECES = st.sampled_from(
    ["muster-grant-1", "muster-mandate-1", ".", "..", "e30", "bnVsbA", "W1tbW1tb", "A" * 86]
)


@given(
    st.lists(
        st.one_of(st.text(), st.lists(PIECES | st.text(max_size=5), max_size=6).map("".join)), max_size=10
    )
)
def test_hostile_chains_give_only_a_refusal(chain):
    assert isinstance(ask(tuple(chain)), grants.GrantRefused)
    for sealed in chain:
        with pytest.raises(errors.Refused):
            NOBODY.accept(sealed, known=())


RULES = st.one_of(
    st.just(documents.AnyValue()),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(
        lambda values: documents.ValueIn(values=tuple(values))
    ),
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(
        lambda two: documents.ValueRange(low=two[0], high=two[1])
    ),
)
PATHS = st.sampled_from(["", "", "", "a", "a", "a/b", "a/b/c", "b", "ab"])
LINKS = st.one_of(
    st.lists(st.tuples(st.integers(1, 5), RULES, PATHS), min_size=1, max_size=3),
    st.lists(RULES, min_size=1, max_size=3).map(  # the tiers in order, so that most are good
        lambda rules: [(5 - number, rule, "") for number, rule in enumerate(rules)]
    ),
)


@given(
    links=LINKS,
    tier=st.integers(1, 5),
    value=st.integers(0, 5),
    path=PATHS,
    place=PATHS,
)
def test_granted_only_if_every_link_allows(links, tier, value, path, place):
    """Random chains, judged here by plain words for each link and there by `verify`."""
    signer = ROOT.key
    above: tuple[str, ...] = ()
    for number, (level, rule, domain) in enumerate(links):
        own = key()
        mandate = documents.Mandate(
            issuer=signer.public,
            subject=own.public,
            name=f"m{number}",
            tier=level,
            may_grant={"_v": rule},
            scope=documents.GrantScope(domain=domain),
            issued_at=NOW,
            expires_at=NOW + DAY_S,
        )
        above = (documents.seal(signer, mandate), *above)
        signer = own
    chain = unchecked(
        signer, above, tier=tier, attributes={"_v": value}, scope=documents.GrantScope(domain=path)
    )
    answer = ask(chain, documents.GrantSituation(holder="controller", domain=place))

    def inside(below: str, top: str) -> bool:
        return top == "" or below.split("/")[: len(top.split("/"))] == top.split("/")

    def permits(rule: documents.Rule) -> bool:
        if isinstance(rule, documents.ValueIn):
            return value in rule.values
        return not isinstance(rule, documents.ValueRange) or rule.low <= value <= rule.high

    tiers = [level for level, _, _ in links]
    domains = ["", *(domain for _, _, domain in links), path, place]
    expected = (
        all(a > b for a, b in itertools.pairwise(tiers))
        and tier <= min(tiers)
        and all(permits(rule) for _, rule, _ in links)
        and all(inside(below, top) for top, below in itertools.pairwise(domains))
    )
    assert isinstance(answer, grants.VerifiedGrant) == expected


def test_a_domain_has_a_root_of_authorities(tmp_path):
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    root = trust.root_authority()
    chain = root.grant("controller", {"_trust_level": 1}, tier=1, now=NOW, lifetime_s=60)
    assert isinstance(ask(chain, root=trust.root_of_grants()), grants.VerifiedGrant)
    (trust.folder / "accounts" / "north" / "grants.seed").unlink()
    assert trust.root_of_grants() == root.key.public  # verifying needs no secret
    with pytest.raises(errors.NotFound, match=r"grants\.seed"):
        trust.root_authority()
