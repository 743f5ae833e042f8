"""The rules for models, grants and revocations, and their boundary cases."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from muster.core import errors
from muster.notify import authorities, models, protocol, rows
from muster.predicates import types
from muster.trust import documents, grants, nkeys

NOW = 1_800_000_000
ROOT = grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT))


def granted(value: Any = 1, *, holder: str = "boss", **more: Any) -> tuple[str, ...]:
    scope = documents.GrantScope(**more.pop("scope", {}))
    options = {"tier": 1, "now": NOW, "lifetime_s": 60, **more}
    return ROOT.grant(holder, {"_rank": value}, scope=scope, **options)


def appointed(name: str = "west", **more: Any) -> grants.Authority:
    key = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
    rules: dict[str, Any] = {"_rank": documents.AnyValue()}
    mandates = ROOT.appoint(key.public, name, tier=2, may_grant=rules, now=NOW, lifetime_s=3600, **more)
    return grants.Authority(key, mandates)


def take(knows: authorities.AuthorityView, *chains: tuple[str, ...]) -> None:
    for chain in chains:
        knows.apply_entry(f"grant.{documents.serial_of(chain[0])}", msgspec.json.encode(chain))


@pytest.fixture
def knows() -> authorities.AuthorityView:
    return authorities.AuthorityView(root=ROOT.key.public, domain="earth")


def rank(
    knows: authorities.AuthorityView, receiver: str = "p", *, now: float = NOW + 1, process: str = "boss"
) -> Any:
    held = knows.effective_attributes(process, receiver, now=now).everywhere.get("_rank")
    return None if held is None else held.value


def rank_in(
    knows: authorities.AuthorityView, region: str, *, receiver: str = "p", now: float = NOW + 1
) -> Any:
    return knows.receiver_attributes("boss", receiver, region, now=now)[0].get("_rank")


def count_verifications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each grant that is verified from now on."""
    verify, requests = grants.verify, list[int]()

    def counted(*arguments: Any, **options: Any) -> grants.VerifiedGrant | grants.GrantRefused:
        requests.append(1)
        return verify(*arguments, **options)

    monkeypatch.setattr(grants, "verify", counted)
    return requests


# What is kept.


def test_a_record_has_new_versions_for_the_holders_whose_attributes_may_change(
    knows: authorities.AuthorityView,
):
    chain = granted()
    define = protocol.DefineModel(name="M", attributes={"x": "int"})
    knows.apply_entry("model.receiver.M", msgspec.json.encode(define))
    knows.apply_entry("something.else", b"?")
    assert not knows.versions
    assert knows.vocabulary.receivers["M"].attributes == {"x": types.INT}
    take(knows, chain)
    assert knows.versions == {"boss": 1}
    listed = ROOT.revoke([documents.serial_of(chain[0])], number=1, now=NOW)
    take(knows, granted(holder="farm"))
    knows.apply_entry("revoked.x", listed.encode())
    assert knows.versions == {"boss": 2, "farm": 2}
    knows.apply_entry("revoked.x", ROOT.revoke([], number=1, now=NOW + 1).encode())
    assert knows.versions == {"boss": 2, "farm": 2}, "not newer"
    assert rank(knows) is None


def test_a_grant_that_is_valid_for_too_long_is_refused():
    """A revocation may not reach every notifier: the expiry limits how long a revoked grant has an effect."""
    view = authorities.AuthorityView(root=ROOT.key.public, domain="earth", lifetime_s_max=60)
    short, long = granted(lifetime_s=60), granted(holder="farm", lifetime_s=61)
    assert view.grant_key(short, now=NOW)
    with pytest.raises(errors.Forbidden, match="longer than 60 s"):
        view.grant_key(long, now=NOW)
    take(view, short, long)
    assert rank(view) is not None
    assert rank(view, process="farm") is None


def test_what_kind_of_grants_a_process_has_is_known(knows: authorities.AuthorityView):
    take(
        knows,
        granted(holder="a"),
        granted(holder="b", scope={"region": "west"}),
        granted(holder="c", scope={"prefix": "fire"}),
    )
    assert [[each for each in "abcd" if has(each)] for has in (knows.has_grants, knows.has_regions)] == [
        ["a", "b", "c"],
        ["b"],
    ]
    assert [each for each in "abcd" if knows.has_prefixes(each)] == ["c"]


def test_a_dropped_grant_is_no_longer_in_force(knows: authorities.AuthorityView):
    first, second, other = granted(1), granted(2, tier=2), granted(3, holder="farm")
    take(knows, first, second, other)
    serials = [documents.serial_of(chain[0]) for chain in (first, second, other)]
    assert rank(knows) == 2
    knows.remove_entry(f"model.{serials[1]}")
    assert rank(knows) == 2
    knows.remove_entry(f"grant.{serials[1]}")
    assert rank(knows) == 1
    assert knows.chains() == {serials[0]: first, serials[2]: other}
    knows.remove_entry(f"grant.{serials[0]}")
    assert (rank(knows), knows.has_grants("boss"), knows.has_grants("farm")) == (None, False, True)
    assert rank(knows, process="farm") == 3


@pytest.mark.parametrize("name", ["_id", "_process"])
def test_no_grant_and_no_model_has_the_names_of_a_proved_identity(
    knows: authorities.AuthorityView, name: str
):
    for scope in (documents.GrantScope(), documents.GrantScope(region="north")):
        chain = ROOT.grant(
            "evil",
            {name: "admin"},
            tier=1,
            now=NOW,
            lifetime_s=60,
            scope=scope,
        )
        with pytest.raises(errors.Forbidden, match="proved by the broker"):
            knows.grant_key(chain, now=NOW)
    with pytest.raises(errors.InvalidInput, match="reserved"):
        knows.model_key(protocol.DefineModel(name="M", attributes={name: "string"}))


def test_types_of_events_and_attributes_of_their_content_have_different_names(
    knows: authorities.AuthorityView,
):
    def define(name: str, **attributes: str) -> None:
        key = knows.model_key(event := protocol.DefineModel(name=name, attributes=attributes, of="event"))
        knows.apply_entry(key, msgspec.json.encode(event))

    define("alert", level="int")
    define("alert", level="int")
    for name, attributes in (("level", {}), ("chat", {"alert": "bool"}), ("note", {"note": "bool"})):
        with pytest.raises(errors.Conflict, match="already the name of an event"):
            define(name, **attributes)
    with pytest.raises(errors.Conflict, match="alert is already"):
        define("alert", level="int", alert="bool")
    # Models of an earlier version stay as they are, and can be defined again.
    stored = protocol.DefineModel(name="old", attributes={"alert": "bool", "old": "bool"}, of="event")
    knows.apply_entry("model.event.old", msgspec.json.encode(stored))
    define("old", alert="bool", old="bool", more="int")
    vocabulary = knows.vocabulary
    assert vocabulary.event("old", {"more": 1}) == {"more": 1}
    for kind, content in (("chat", {"alert": True}), ("old", {"old": False}), ("x", {"x": 1}), ("level", {})):
        with pytest.raises(errors.InvalidInput):
            vocabulary.event(kind, content)


def test_the_type_and_the_identity_of_an_event_are_what_was_proved():
    event = protocol.AdmittedEvent(
        id="1",
        type="note",
        sender="evil/s",
        content={"note": False, "x": 1},
        attributes={"_id": "admin/x", "_rank": 1},
        within=(protocol.ScopedAttributes(attributes={"_id": "admin/x", "_process": "admin", "_rank": 7}),),
    )
    for within, rank_there in (((), 1), (event.within, 7)):
        assert event.attribute_values(within) == {
            "note": True,
            "x": 1,
            "sender._id": "evil/s",
            "sender._process": "evil",
            "sender._rank": rank_there,
        }


def test_the_key_of_a_model_contains_its_kind(knows: authorities.AuthorityView):
    event = protocol.DefineModel(name="alert", attributes={"level": "int"}, of="event")
    assert knows.model_key(event) == "model.event.alert"
    receiver = protocol.DefineModel(name="M", attributes={"x": "int"})
    assert knows.model_key(receiver) == "model.receiver.M"
    knows.apply_entry("model.receiver.M", msgspec.json.encode(receiver))
    with pytest.raises(errors.Conflict):
        knows.model_key(protocol.DefineModel(name="M", attributes={"x": "string"}))
    made = models.Model("M", {"x": types.INT, "s": types.set_of("a", "b")})
    assert authorities.model_of(authorities.define_of(made)) == made
    assert authorities.define_of(models.Model("e", {}, models.ModelKind.EVENT)).of == "event"


# What comes in.


@pytest.mark.parametrize(
    ("lifetime_s", "kept_s"),
    [(60.0, 60.0 + 86_400.0 + 0.5), (9e8 - 86_401.0, 9e8 - 1.0 + 0.5), (9e8 - 86_400.0 + 1, None)],
)
def test_a_grant_is_kept_for_a_day_after_its_end_or_for_good(knows, lifetime_s, kept_s):
    chain = granted(lifetime_s=lifetime_s)
    key, for_s = knows.grant_key(chain, now=NOW - 0.5)
    assert key == f"grant.{documents.serial_of(chain[0])}"
    assert for_s == (None if kept_s is None else pytest.approx(kept_s))


@pytest.mark.parametrize(("ahead_s", "good"), [(0, True), (60, True), (61, False)])
def test_an_authoritys_clock_may_be_a_minute_ahead(knows, ahead_s, good):
    chain = granted(now=NOW + ahead_s)
    if good:
        knows.grant_key(chain, now=NOW)
    else:
        with pytest.raises(errors.Forbidden, match="not-yet-valid"):
            knows.grant_key(chain, now=NOW)


def test_a_grant_that_has_ended_or_is_none_is_refused(knows: authorities.AuthorityView):
    with pytest.raises(errors.Forbidden, match="expired"):
        knows.grant_key(granted(), now=NOW + 60)
    knows.grant_key(granted(), now=NOW + 59)
    for chain in ((), ("rubbish",)):
        with pytest.raises(errors.InvalidInput, match="not a grant"):
            knows.grant_key(chain, now=NOW)
    stranger = grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT))
    with pytest.raises(errors.Forbidden, match="unknown-authority"):
        knows.grant_key(stranger.grant("boss", {"_rank": 1}, tier=1, now=NOW, lifetime_s=60), now=NOW)


@pytest.mark.parametrize(
    "scope",
    [
        {"domain": "earth"},
        {"region": "west"},
        {"prefix": "fire"},
        {"audience": ("farm/east", "other")},
        {"domain": "earth", "region": "west", "prefix": "fire", "audience": ("farm",)},
    ],
)
def test_a_grant_that_holds_somewhere_in_this_domain_is_accepted(knows, scope):
    knows.grant_key(granted(scope=scope), now=NOW)
    with pytest.raises(errors.Forbidden, match="out-of-scope"):
        knows.grant_key(granted(scope={**scope, "domain": "mars"}), now=NOW)


def test_a_list_of_revocations_is_accepted_from_authorities_that_are_known(knows: authorities.AuthorityView):
    west = appointed()
    listed = west.revoke(["x"], number=2, now=NOW)
    with pytest.raises(errors.Refused, match="no authority"):
        knows.revocation_key(listed)
    take(knows, west.grant("boss", {"_rank": 1}, tier=1, now=NOW, lifetime_s=60))
    assert knows.revocation_key(listed) == f"revoked.{west.key.public}"
    root_list = ROOT.revoke(["x"], number=1, now=NOW)
    assert knows.revocation_key(root_list) == f"revoked.{ROOT.key.public}"
    knows.apply_entry("revoked.w", listed.encode())
    with pytest.raises(errors.Refused, match="old"):
        knows.revocation_key(west.revoke([], number=1, now=NOW))
    with pytest.raises(errors.Refused, match="no authority"):
        authorities.AuthorityView(domain="earth").revocation_key(root_list)


# What is trusted.


def test_of_a_process_without_grants_nothing_is_effective(knows: authorities.AuthorityView):
    assert knows.effective_attributes("boss", "p", now=NOW) is authorities.NOTHING
    assert knows.receiver_attributes("boss", "p", "", now=NOW) == ({}, float("inf"))


@pytest.mark.parametrize(
    ("now", "value"), [(NOW - 1, None), (NOW, 1), (NOW + 59, 1), (NOW + 59.9, 1), (NOW + 60, None)]
)
def test_a_grant_is_in_force_from_its_beginning_to_its_end(knows, now, value):
    take(knows, granted())
    assert rank(knows, now=now) == value
    assert rank_in(knows, "", now=now) == value


def test_what_is_remembered_ends_with_the_grant(knows: authorities.AuthorityView):
    take(knows, granted())
    assert [rank(knows, now=NOW + after) for after in (1, 59, 60)] == [1, 1, None]


def test_a_grant_that_had_not_begun_is_asked_again_after_a_second(knows: authorities.AuthorityView):
    take(knows, granted(now=NOW + 10))
    assert rank_in(knows, "", now=NOW) is None
    assert knows.receiver_attributes("boss", "p", "", now=NOW)[1] == NOW + 1.0
    assert rank_in(knows, "", now=NOW + 10) == 1
    assert rank(knows, now=NOW + 10) == 1
    assert knows.receiver_attributes("boss", "p", "", now=NOW + 10)[1] == NOW + 70


def test_a_grant_that_will_never_hold_is_not_verified_again(knows: authorities.AuthorityView, monkeypatch):
    take(knows, granted(scope={"domain": "mars"}))
    assert rank(knows) is None
    verifications = count_verifications(monkeypatch)
    assert (rank(knows, now=NOW + 3000), verifications) == (None, [])
    assert knows.receiver_attributes("boss", "p", "", now=NOW)[1] == float("inf")


def test_what_was_verified_is_not_verified_again_for_other_parties(
    knows: authorities.AuthorityView, monkeypatch
):
    take(knows, granted())
    verifications = count_verifications(monkeypatch)
    assert [rank(knows, f"p{number}") for number in range(5)] == [1] * 5
    assert len(verifications) == 1
    result = knows.effective_attributes("boss", "p0", now=NOW + 2)
    assert knows.effective_attributes("boss", "p0", now=NOW + 3) is result


def test_effective_attributes_are_computed_again_after_a_minute(knows: authorities.AuthorityView):
    take(knows, granted(lifetime_s=3600))
    result = knows.effective_attributes("boss", "p", now=NOW)
    assert knows.effective_attributes("boss", "p", now=NOW + 59.9) is result
    assert knows.effective_attributes("boss", "p", now=NOW + 60) is not result


def test_attributes_of_parties_are_cached_up_to_a_limit(knows: authorities.AuthorityView):
    take(knows, granted(lifetime_s=3600))
    first = knows.effective_attributes("boss", "p", now=NOW)
    for number in range(10_000):
        knows._effective["boss", str(number)] = (NOW + 100.0, first)
    del knows._effective["boss", "0"]
    knows.effective_attributes("boss", "new", now=NOW)
    assert len(knows._effective) == 10_001
    knows.effective_attributes("boss", "newer", now=NOW)
    assert list(knows._effective) == [("boss", "newer")]


def test_a_new_record_changes_the_granted_attributes_at_once(knows: authorities.AuthorityView):
    first, second = granted(1), granted(2)
    take(knows, first)
    assert rank(knows) == 1
    take(knows, second)
    assert rank(knows) == 2
    knows.apply_entry("revoked.x", ROOT.revoke([documents.serial_of(second[0])], number=1, now=NOW).encode())
    assert rank(knows) == 1


def test_the_highest_tier_prevails_and_of_equals_the_last_handed_in(knows: authorities.AuthorityView):
    take(knows, granted(1, tier=2), granted(2, tier=1))
    assert (rank(knows), rank_in(knows, "")) == (1, 1)
    take(knows, granted(3, tier=2))
    assert (rank(knows), rank_in(knows, "")) == (3, 3)
    take(knows, granted(1, tier=2))
    assert (rank(knows), rank_in(knows, "")) == (1, 1), "also if it was handed in before"


def test_a_grant_for_some_parties_counts_for_those_below_its_prefix(knows: authorities.AuthorityView):
    take(knows, granted(scope={"prefix": "fire"}))
    assert [rank(knows, receiver) for receiver in ("fire", "fire.7", "flood", "firewall")] == [
        1,
        1,
        None,
        None,
    ]


def test_a_regional_grant_counts_for_receivers_in_that_region(knows: authorities.AuthorityView):
    take(knows, granted(scope={"region": "west"}))
    assert [rank_in(knows, region) for region in ("west", "west/coast", "east", "")] == [1, 1, None, None]
    believed = knows.effective_attributes("boss", "p", now=NOW + 1)
    assert believed.everywhere == {}
    assert believed.within == (protocol.ScopedAttributes(attributes={"_rank": 1}, region="west"),)
    ((scope, held),) = believed.scoped
    assert (scope.region, held["_rank"].value, held["_rank"].granted.holder) == ("west", 1, "boss")


def test_a_grant_for_an_audience_does_not_count_for_addresses(knows: authorities.AuthorityView):
    take(knows, granted(scope={"audience": ("farm", "web")}))
    assert rank_in(knows, "") is None
    believed = knows.effective_attributes("boss", "p", now=NOW + 1)
    assert believed.everywhere == {}
    assert believed.within == (protocol.ScopedAttributes(attributes={"_rank": 1}, audience=("farm", "web")),)


def test_what_holds_everywhere_prevails_over_scopes_that_came_before_it_only(
    knows: authorities.AuthorityView,
):
    take(knows, granted(1, scope={"region": "west"}), granted(2))
    believed = knows.effective_attributes("boss", "p", now=NOW + 1)
    assert (believed.everywhere["_rank"].value, believed.within, believed.scoped) == (2, (), ())
    take(knows, granted(3, scope={"region": "east"}))
    believed = knows.effective_attributes("boss", "p", now=NOW + 1)
    assert believed.everywhere["_rank"].value == 2
    assert [(each.region, each.attributes) for each in believed.within] == [("east", {"_rank": 3})]


def test_of_a_scope_only_the_attributes_that_hold_everywhere_are_overruled(knows: authorities.AuthorityView):
    both = ROOT.grant(
        "boss",
        {"_rank": 1, "_trust": 5},
        tier=1,
        now=NOW,
        lifetime_s=60,
        scope=documents.GrantScope(region="west"),
    )
    take(knows, both, granted(2))
    believed = knows.effective_attributes("boss", "p", now=NOW + 1)
    assert [(each.region, each.attributes) for each in believed.within] == [("west", {"_trust": 5})]


def test_several_words_are_granted_as_a_set(knows: authorities.AuthorityView):
    take(knows, granted(("a", "b")))
    assert rank(knows) == rank_in(knows, "") == frozenset({"a", "b"})


def test_until_when_is_the_first_end_of_a_grant(knows: authorities.AuthorityView):
    take(knows, granted(1, lifetime_s=90), granted(2, lifetime_s=30, scope={"region": "east"}))
    assert knows.receiver_attributes("boss", "p", "", now=NOW)[1] == NOW + 30


# For people.


def test_a_grant_is_shown_with_its_authority_its_scope_and_its_state(knows: authorities.AuthorityView):
    west = appointed(scope=documents.GrantScope(domain="earth"))
    scope = documents.GrantScope(domain="earth", region="west", audience=("farm",))
    chain = west.grant("boss", {"_rank": 1}, tier=1, now=NOW, lifetime_s=60, scope=scope)
    take(knows, chain)
    shown = knows.describe_grant(documents.serial_of(chain[0]), chain, now=NOW + 1)
    assert shown == rows.GrantRow(
        serial=documents.serial_of(chain[0]),
        mandates=[documents.serial_of(chain[1])],
        holder="boss",
        attributes={"_rank": 1},
        tier=1,
        authority="west",
        scope={"domain": "earth", "region": "west", "audience": ("farm",)},
        expires_at=NOW + 60,
        status="valid",
    )
    assert knows.describe_grant("s", chain, now=NOW + 60).status == "expired"
    own = granted()
    shown = knows.describe_grant("s", own, now=NOW + 1)
    assert (shown.authority, shown.scope, shown.mandates) == ("root", {}, [])


def test_when_a_grant_was_made_is_known(knows: authorities.AuthorityView):
    take(knows, granted(now=NOW - 7))
    held = knows.effective_attributes("boss", "p", now=NOW).everywhere["_rank"]
    assert knows.issued_at(held.granted) == NOW - 7


def test_beliefs_are_values():
    for each in (authorities.GrantedAttribute(1, None), authorities.NOTHING):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, dataclasses.fields(each)[0].name, 1)
        assert not hasattr(each, "__dict__")
