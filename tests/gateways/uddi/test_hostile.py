"""Requests of one UDDI client, or contexts written without UDDI, do not affect other clients."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from muster.bus import api
from muster.core.formats import xml
from muster.gateways.soap import faults
from muster.gateways.uddi import auth_tokens, endpoints, inquiry, plain_entries, records, registry
from muster.gateways.uddi.model import keys, matcher, schema, standard_tmodels, wsdl
from muster.inform import protocol, service_entries
from muster.trust.login import password_checker, passwords
from muster.trust.permissions import roles
from tests.gateways.uddi.conftest import U, Uddi

TYPES = standard_tmodels.TYPES


def _no_bus(_: str, __: str) -> contextlib.AbstractAsyncContextManager[api.Bus]:
    raise AssertionError("no bus is needed")


ENTRY = service_entries.ServiceEntry(
    id="printer",
    name="Printer",
    access=("http://a", "http://b", "http://c"),
    categories=("uddi:Example.org:Kind=laser",),
    metadata={"floor": 3, "color": True, "tags": ["x", "y"], "lon": 1.5, "lat": 2.5},
    description=b"%PDF-1.7 the manual",
)


def model(key: str, name: str = "mine") -> str:
    return (
        f'<tModel tModelKey="{key}"><name>{name}</name><categoryBag>'
        f'<keyedReference tModelKey="{TYPES}" keyName="" keyValue="keyGenerator"/></categoryBag></tModel>'
    )


# Keys


@pytest.mark.parametrize(
    "key",
    [
        "uddi:uddi.org:keygenerator",
        "uddi:muster:keygenerator",
        "uddi:uddi.org:mine:keygenerator",
        "uddi:muster:mine:keygenerator",
        "uddi:UDDI.org:keygenerator",
    ],
)
async def test_reserved_keys_are_given_to_no_publisher(uddi: Uddi, key: str):
    token = await uddi.token()
    code = await uddi.fault(f"<save_tModel>{token}{model(key)}</save_tModel>")
    assert code in ("E_keyUnavailable", "E_userMismatch")
    # Nor by writing the context by hand, as a user may.
    element = xml.XmlElement(
        U("tModel"), xml.XmlElement(U("name"), "mine"), attributes={"tModelKey": key.lower()}
    )
    await uddi.contexts.put(
        f"uddi/tmodel/{key.lower()}", xml.write(element), attributes={"kind": "tmodel", "uddi": True}
    )
    business = f'<businessEntity businessKey="{key.lower().removesuffix("keygenerator")}b"><name>b</name>'
    saved = f"<save_business>{await uddi.token('bob')}{business}</businessEntity></save_business>"
    assert await uddi.fault(saved) == "E_keyUnavailable"


def test_a_reserved_key_needs_no_generator_to_be_refused():
    for key in ("uddi:uddi.org:keygenerator", "uddi:muster:a", "uddi:muster"):
        assert not keys.may_propose(key, "ann", lambda _: "ann")
    assert keys.may_propose("uddi:muster.example:keygenerator", "ann", lambda _: None)


#: Of chapter 11 of the standard.
CANONICAL = """
keygenerator relationships categorization:types categorization:general_keywords categorization:nodes
categorization:entitykeyvalues categorization:owningbusiness categorization:validatedby
categorization:derivedfrom identifier:isreplacedby transport:http transport:smtp transport:ftp transport:fax
transport:telephone protocol:serverauthenticatedssl3 protocol:mutualauthenticatedssl3 v3_inquiry
v3_publication v3_security v3_ownership_transfer v3_subscription v3_subscriptionlistener v3_replication
v3_valuesetcaching
v3_valuesetvalidation specification:hostingredirector specification:v3_policy sortorder:binarysort
sortorder:uts-10 findqualifier:approximatematch findqualifier:exactmatch findqualifier:caseinsensitivematch
findqualifier:casesensitivematch findqualifier:diacriticsinsensitivematch findqualifier:signaturepresent
findqualifier:diacriticssensitivematch findqualifier:caseinsensitivesort findqualifier:casesensitivesort
findqualifier:sortbynameasc findqualifier:sortbynamedesc findqualifier:sortbydateasc
findqualifier:sortbydatedesc findqualifier:andallkeys findqualifier:orallkeys findqualifier:orlikekeys
findqualifier:combinecategorybags findqualifier:servicesubset findqualifier:bindingsubset
findqualifier:suppressprojectedservices
"""


async def test_the_standard_models_are_there_from_the_start(uddi: Uddi):
    for key in ("uddi:uddi.org:keygenerator", TYPES, matcher.KEYWORDS, matcher.LEASE):
        detail = await uddi.ask(f"<get_tModelDetail><tModelKey>{key}</tModelKey></get_tModelDetail>")
        assert detail.children[0].get("tModelKey") == key
    for key in CANONICAL.split():
        assert standard_tmodels.MODELS[f"uddi:uddi.org:{key}"].text_of(schema.UDDI("name"))
    actual = await uddi.ask("<find_tModel><name>uddi-org:types</name></find_tModel>")
    assert TYPES in str(actual)
    token = await uddi.token()
    gone = f"<delete_tModel>{token}<tModelKey>{TYPES}</tModelKey></delete_tModel>"
    assert await uddi.fault(gone) == "E_userMismatch"
    mine = await uddi.ask(f'<get_registeredInfo infoSelection="all">{token}</get_registeredInfo>')
    assert mine.children == []


def test_standard_models_keep_to_the_schema():
    for key, element in standard_tmodels.MODELS.items():
        checked = schema.validate(element)
        assert (checked.get("tModelKey"), keys.is_reserved(key)) == (key, True)


# Tokens


def test_discarded_tokens_lock_out_no_other_publisher():
    made = auth_tokens.AuthTokens()
    mallory, alice = (
        passwords.PasswordLogin("mallory", roles.Role.USER),
        passwords.PasswordLogin("alice", roles.Role.USER),
    )
    mine = made.issue(alice, 0.0)
    for number in range(auth_tokens.ALL_MAX + 10):
        text = made.issue(mallory, 1.0)
        if number % 2:
            made.discard(text, 1.0)
    assert made.caller(mine, 2.0) == alice
    assert made.caller(made.issue(alice, 3.0), 3.0) == alice
    assert len(made._tokens) == 2 + auth_tokens.OF_PUBLISHER_MAX
    for _ in range(auth_tokens.OF_PUBLISHER_MAX):
        made.issue(alice, 4.0)
    with pytest.raises(faults.SoapFault):
        made.caller(mine, 5.0)  # the one that she used longest ago made room
    assert sum(map(len, made._by_publisher.values())) == len(made._tokens)


def test_many_publishers_reuse_the_room_of_ended_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auth_tokens, "ALL_MAX", 10)
    made = auth_tokens.AuthTokens()
    for number in range(10):
        made.discard(made.issue(passwords.PasswordLogin(f"u{number}", roles.Role.USER), 0.0), 0.0)
    for number in range(10):
        made.issue(passwords.PasswordLogin(f"v{number}", roles.Role.USER), 1.0)
    with pytest.raises(faults.SoapFault, match="in use"):
        made.issue(passwords.PasswordLogin("one more", roles.Role.USER), 1.0)


@pytest.mark.parametrize(
    ("role", "password"), [(roles.Role.VIEWER, "old-password"), (roles.Role.OPERATOR, "new-password")]
)
async def test_a_token_ends_when_the_password_or_the_role_changes(tmp_path, role: roles.Role, password: str):
    known = passwords.PasswordStore(tmp_path)
    checked = password_checker.PasswordChecker(known)

    made = endpoints.UddiEndpoints(registry.UddiRegistry(_no_bus), checked.check, is_current=checked.stands)

    async def token(cred: str) -> str:
        element = xml.XmlElement(U("get_authToken"), attributes={"userID": "bob", "cred": cred})
        answer = await made._operation(schema.validate(element))
        assert answer is not None
        return answer.text_of(U("authInfo"))

    known.set("bob", roles.Role.OPERATOR, "old-password")
    old = await token("old-password")
    assert await made._publisher(old) == ("bob", "operator")
    known.set("bob", role, password)
    new = await token(password)
    assert await made._publisher(new) == ("bob", role.value)
    with pytest.raises(faults.SoapFault, match="has changed"):
        await made._publisher(old)


# Contexts written by hand


async def test_contexts_that_are_no_entities_do_not_break_inquiries(uddi: Uddi):
    await uddi.services.save(service_entries.ServiceEntry(id="printer", name="Printer"))
    service: protocol.Attributes = {"kind": "service", "uddi": True}
    await uddi.contexts.put("service/deep", b"<a>" * 65 + b"</a>" * 65, attributes=service)
    await uddi.contexts.put("service/many", b"<a>" + b"<b/>" * 50_001 + b"</a>", attributes=service)
    await uddi.contexts.put("uddi/assertion/x", b"<a>" * 65, attributes={"kind": "assertion"})
    await uddi.contexts.put("uddi/business/x", b"\xff", attributes={"kind": "business", "uddi": True})
    actual = await uddi.ask("<find_service><name>Printer</name></find_service>")
    assert "uddi:printer" in str(actual)
    await uddi.ask("<find_business><name>Muster</name></find_business>")
    detail = "<get_serviceDetail><serviceKey>uddi:deep</serviceKey></get_serviceDetail>"
    assert await uddi.fault(detail) == "E_invalidKeyPassed"


# Entries saved without UDDI


async def test_an_entry_saved_without_uddi_keeps_what_uddi_does_not_show(uddi: Uddi):
    made = await uddi.services.save(ENTRY, lease_s=600)
    mine = registry.UddiPublisher("carl", "user")
    an_hour_ahead = registry.UddiRegistry(lambda *_: uddi.visit("carl"), now_s=lambda: time.time() + 3600)
    before = await uddi.contexts.get("service/printer", max_staleness_s=0.0)
    publication = uddi.publication(an_hour_ahead)
    element = xml.XmlElement(U("delete_binding"), xml.XmlElement(U("bindingKey"), "uddi:printer:2"))
    await publication.delete_binding(element, mine)
    context = await uddi.contexts.get("service/printer", max_staleness_s=0.0)
    after = service_entries.from_context(context)
    assert after.access == ("http://a", "http://c")
    assert (after.description, after.metadata, after.categories, after.name) == (
        made.description,
        made.metadata,
        made.categories,
        made.name,
    )
    assert abs(context.expires_at_ns - before.expires_at_ns) < 5e9


def test_only_what_a_plain_entry_has_a_place_for_is_changed():
    shown = records.from_entry(ENTRY)
    assert plain_entries.edited(ENTRY, shown) == ENTRY
    renamed = [
        xml.XmlElement(U("name"), "Plotter") if child.local == "name" else child for child in shown.children
    ]
    changed = plain_entries.edited(ENTRY, xml.XmlElement(shown.name, *renamed, attributes=shown.attributes))
    assert (changed.name, changed.metadata, changed.access) == ("Plotter", ENTRY.metadata, ENTRY.access)
    for more in (xml.XmlElement(U("name"), "second"), xml.XmlElement(U("description"), "text")):
        with pytest.raises(schema.InvalidUddi):
            plain_entries.edited(ENTRY, xml.XmlElement(shown.name, *shown.children, more))
    elsewhere = {**shown.attributes, "businessKey": "uddi:example.org:b"}
    with pytest.raises(schema.InvalidUddi):
        plain_entries.edited(ENTRY, xml.XmlElement(shown.name, *shown.children, attributes=elsewhere))


def test_any_host_header_is_quoted_in_the_description():
    assert b"http://h&lt;&quot;7/uddi/inquiry" in wsdl.wsdl('http://h<"7/uddi')


async def test_the_details_of_many_businesses_take_one_search(uddi: Uddi, monkeypatch: pytest.MonkeyPatch):
    token = await uddi.token()
    keys = []
    for number in range(3):
        saved = await uddi.ask(
            f"<save_business>{token}<businessEntity><name>b{number}</name><businessServices>"
            f"<businessService><name>s{number}</name></businessService></businessServices></businessEntity>"
            "</save_business>"
        )
        keys.append(saved.children[0].get("businessKey"))
    searches: list[str] = []
    find = registry.UddiRegistry.find

    async def counted(
        self: registry.UddiRegistry, kind: str, condition: str = ""
    ) -> list[records.UddiRecord]:
        searches.append(kind)
        return await find(self, kind, condition)

    monkeypatch.setattr(registry.UddiRegistry, "find", counted)
    requested = "".join(f"<businessKey>{key}</businessKey>" for key in keys)
    detail = await uddi.ask(f"<get_businessDetail>{requested}</get_businessDetail>")
    assert [business.get("businessKey") for business in detail.children] == keys
    names = [element.text for element in detail.walk() if element.name == U("name")]
    assert names == ["b0", "s0", "b1", "s1", "b2", "s2"]
    assert searches == ["service", "business"]


@pytest.mark.parametrize("search", ["service", "business", "binding", "tModel"])
async def test_entities_are_compared_with_a_search_outside_of_the_event_loop(
    uddi: Uddi, monkeypatch: pytest.MonkeyPatch, search: str
):
    await uddi.services.save(ENTRY)
    threads: list[int] = []
    matches = matcher.bag_matches

    def noted(*arguments: Any, **options: Any) -> bool:
        threads.append(threading.get_ident())
        return matches(*arguments, **options)

    monkeypatch.setattr(matcher, "bag_matches", noted)
    reference = f'<keyedReference tModelKey="{TYPES}" keyName="" keyValue="{{}}"/>'
    find = f"<find_{search}><categoryBag>{{}}</categoryBag></find_{search}>"
    await uddi.ask(find.format(reference.format("x")))
    assert search == "binding" or threads
    assert threading.get_ident() not in threads
    many = "".join(map(reference.format, range(inquiry.CRITERIA_MAX + 1)))
    assert await uddi.fault(find.format(many)) == "E_tooManyOptions"


async def test_the_entities_of_a_search_are_parsed_outside_of_the_event_loop(
    uddi: Uddi, monkeypatch: pytest.MonkeyPatch
):
    await uddi.services.save(ENTRY)
    threads: list[int] = []
    read = records.read_record

    def noted(context: protocol.Context) -> records.UddiRecord:
        threads.append(threading.get_ident())
        return read(context)

    monkeypatch.setattr(records, "read_record", noted)
    listed = await uddi.ask("<find_service><name>Printer</name></find_service>")
    assert [element.text for element in listed.walk() if element.name == U("name")] == ["Printer"]
    assert threads
    assert threading.get_ident() not in threads
