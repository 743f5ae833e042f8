"""The UDDI endpoints by hand-written requests: publication, inquiry, refusals with the standard's codes."""

from __future__ import annotations

from muster.gateways.uddi import registry
from muster.gateways.uddi.model import wsdl
from muster.inform import service_entries
from tests.gateways.uddi.conftest import U, Uddi

GENERATOR = """<tModel tModelKey="uddi:example.org:keygenerator"><name>keys of example.org</name><categoryBag>
<keyedReference tModelKey="uddi:uddi.org:categorization:types" keyName="" keyValue="keyGenerator"/>
</categoryBag></tModel>"""
KEYWORDS = "uddi:uddi.org:categorization:general_keywords"

PRINTING = f"""<businessEntity businessKey="uddi:example.org:b1"><name xml:lang="en">Example Printing</name>
<description>We print</description><businessServices><businessService serviceKey="uddi:example.org:s1">
<name>Printer  three</name><bindingTemplates><bindingTemplate bindingKey="uddi:Example.org:t1">
<accessPoint useType="endPoint">http://127.0.0.1:1/print</accessPoint><tModelInstanceDetails>
<tModelInstanceInfo tModelKey="uddi:example.org:ipp"/></tModelInstanceDetails></bindingTemplate>
</bindingTemplates><categoryBag><keyedReference tModelKey="{KEYWORDS}" keyName="floor" keyValue="2"/>
<keyedReference tModelKey="uddi:example.org:colour" keyValue="blue"/></categoryBag></businessService>
</businessServices><identifierBag><keyedReference tModelKey="uddi:example.org:vat" keyValue="7"/>
</identifierBag></businessEntity>"""


MODELS = "".join(
    f'<tModel tModelKey="uddi:example.org:{name}"><name>{name}</name></tModel>'
    for name in ("colour", "ipp", "size", "vat")
)
#: A signature, of which the registry reads nothing.
SIGNATURE = """<d:Signature xmlns:d="http://www.w3.org/2000/09/xmldsig#"><d:SignedInfo>
<d:CanonicalizationMethod Algorithm="urn:uddi-org:schemaCentricC14N:2002-07-10"/>
<d:SignatureMethod Algorithm="http://www.w3.org/2000/09/xmldsig#rsa-sha1"/><d:Reference URI="">
<d:DigestMethod Algorithm="http://www.w3.org/2000/09/xmldsig#sha1"/><d:DigestValue>bm90aGluZw==</d:DigestValue>
</d:Reference></d:SignedInfo><d:SignatureValue>bm90aGluZw==</d:SignatureValue></d:Signature>"""


def qualified(*names: str) -> str:
    words = "".join(f"<findQualifier>{name}</findQualifier>" for name in names)
    return f"<findQualifiers>{words}</findQualifiers>"


def model_bag(*names: str) -> str:
    keys = "".join(f"<tModelKey>uddi:example.org:{name}</tModelKey>" for name in names)
    return f"<tModelBag>{keys}</tModelBag>"


async def published(uddi: Uddi) -> str:
    token = await uddi.token()
    await uddi.ask(f"<save_tModel>{token}{GENERATOR}{MODELS}</save_tModel>")
    await uddi.ask(f"<save_business>{token}{PRINTING}</save_business>")
    return token


async def find_keys(uddi: Uddi, body: str) -> list[str]:
    answer = await uddi.ask(body)
    kinds = ("businessInfo", "serviceInfo", "tModelInfo", "bindingTemplate")
    name = {"businessList": 0, "serviceList": 1, "tModelList": 2, "bindingDetail": 3}[answer.local]
    keys = ("businessKey", "serviceKey", "tModelKey", "bindingKey")
    return [node.get(keys[name]) or "" for node in answer.walk() if node.local == kinds[name]]


async def test_what_is_published_is_found_here_and_by_predicates(uddi):
    await published(uddi)
    assert await find_keys(uddi, "<find_business><name>Example Printing</name></find_business>") == [
        "uddi:example.org:b1"
    ]
    detail = await uddi.ask(
        "<get_businessDetail><businessKey>uddi:example.org:B1</businessKey></get_businessDetail>"
    )
    (service,) = [node for node in detail.walk() if node.local == "businessService"]
    assert service.get("businessKey") == "uddi:example.org:b1"
    assert service.text_of(U("name")) == "Printer three", "white space collapses"
    hits = await uddi.contexts.find("floor >= 2 AND name = 'Printer three'")
    assert [context.key for context in hits.contexts] == ["service/example.org:s1"]
    (entry,) = await uddi.services.find("categories CONTAINS 'uddi:example.org:colour=blue'")
    assert entry.access == ("http://127.0.0.1:1/print",)
    assert entry.owner == "ann"


async def test_a_plain_entry_is_a_service_with_keywords_a_box_and_a_lease(uddi):
    saved = await uddi.services.save(
        service_entries.ServiceEntry(
            name="scanner",
            access=("http://127.0.0.1:1/scan",),
            metadata={"floor": 3, "lon": 8.5, "lat": 47.4},
        ),
        lease_s=600,
    )
    key = f"uddi:{saved.id}"
    by_name = '<find_service businessKey="uddi:muster:domain"><name>scanner</name></find_service>'
    assert await find_keys(uddi, by_name) == [key]
    assert await find_keys(
        uddi,
        f'<find_service><categoryBag><keyedReference tModelKey="{KEYWORDS}" keyName="floor" keyValue="3"/>'
        "</categoryBag></find_service>",
    ) == [key]
    detail = await uddi.ask(f"<get_serviceDetail><serviceKey>{key}</serviceKey></get_serviceDetail>")
    names = {
        node.get("keyName"): node.get("keyValue") for node in detail.walk() if node.local == "keyedReference"
    }
    assert names["floor"] == "3"
    assert names["expires_at"].endswith("Z")
    binding = await uddi.ask(f"<get_bindingDetail><bindingKey>{key}:1</bindingKey></get_bindingDetail>")
    assert "http://127.0.0.1:1/scan" in str(binding)
    (info,) = (await uddi.ask("<find_business><name>Muster</name></find_business>")).children[1].children
    assert key in str(info)


async def test_a_plain_entry_whose_name_is_no_key_is_read_under_the_key_it_is_found_by(uddi):
    await uddi.services.save(service_entries.ServiceEntry(id="Scanner 1%", name="scanner"))
    (key,) = await find_keys(uddi, "<find_service><name>scanner</name></find_service>")
    assert key == "uddi:%53canner%201%25"
    detail = await uddi.ask(f"<get_serviceDetail><serviceKey>{key}</serviceKey></get_serviceDetail>")
    assert [node.text for node in detail.walk() if node.local == "name"] == ["scanner"]


async def test_a_truncated_result_is_marked(uddi, monkeypatch):
    monkeypatch.setattr(registry, "RESULTS_MAX", 1)
    for name in ("a", "b"):
        await uddi.services.save(service_entries.ServiceEntry(name=name))
    assert await uddi.fault("<find_service><name>a</name></find_service>") == "E_resultSetTooLarge"


async def test_services_are_found_in_a_box(uddi):
    token = await uddi.token()

    def group(sides: tuple[float, float, float, float]) -> str:
        references = "".join(
            f'<keyedReference tModelKey="uddi:muster:boundingbox" keyName="{name}" keyValue="{side}"/>'
            for name, side in zip(("minX", "minY", "maxX", "maxY"), sides, strict=True)
        )
        return (
            f'<categoryBag><keyedReferenceGroup tModelKey="uddi:muster:boundingbox">{references}'
            "</keyedReferenceGroup></categoryBag>"
        )

    saved = await uddi.ask(
        f"<save_service>{token}<businessService><name>map</name>{group((8.1, 47.1, 8.9, 47.9))}"
        "</businessService></save_service>"
    )
    key = saved.children[0].get("serviceKey")
    for box in ((8, 47, 9, 48), (170, 40, 9, 50)):
        assert await find_keys(uddi, f"<find_service>{group(box)}</find_service>") == [key]
    for box in ((9, 47, 10, 48), (8, 48, 9, 49)):
        assert await find_keys(uddi, f"<find_service>{group(box)}</find_service>") == []
    near = await uddi.services.find(box=service_entries.GeoBox(8, 47, 9, 48))
    assert [match.name for match in near] == ["map"]


async def test_a_service_whose_lease_ends_is_gone(uddi):
    token = await uddi.token()
    saved = await uddi.ask(
        f"<save_service>{token}<businessService><name>brief</name><categoryBag>"
        '<keyedReference tModelKey="uddi:muster:lease" keyName="lease_s" keyValue="0.2"/></categoryBag>'
        "</businessService></save_service>"
    )
    key = saved.children[0].get("serviceKey")
    async for change in uddi.contexts.watch(f"service/{key.removeprefix('uddi:')}"):
        if change.reason == "expire":
            break
    request = f"<get_serviceDetail><serviceKey>{key}</serviceKey></get_serviceDetail>"
    assert await uddi.fault(request) == "E_invalidKeyPassed"


async def test_find_qualifiers(uddi):
    await published(uddi)

    async def service(name: str, *qualifiers: str) -> bool:
        words = "".join(f"<findQualifier>{qualifier}</findQualifier>" for qualifier in qualifiers)
        listed = f"<findQualifiers>{words}</findQualifiers>" if words else ""
        return bool(await find_keys(uddi, f"<find_service>{listed}<name>{name}</name></find_service>"))

    assert await service("Printer three")
    assert not await service("printer three")
    assert not await service("Printer%")
    assert await service("printer three", "caseInsensitiveMatch")
    assert await service("Print_r%", "approximateMatch")
    assert await service("%E", "uddi:uddi.org:findqualifier:approximateMatch", "CASEINSENSITIVEMATCH")
    assert await service("Prïnter three", "diacriticInsensitiveMatch")
    assert not await service("Printer three", "signaturePresent")


async def test_bags_and_fingerprints(uddi):
    await published(uddi)

    def bag(*pairs: tuple[str, str]) -> str:
        inside = "".join(
            f'<keyedReference tModelKey="{model}" keyValue="{value}"/>' for model, value in pairs
        )
        return f"<categoryBag>{inside}</categoryBag>"

    blue, red = ("uddi:example.org:colour", "blue"), ("uddi:example.org:colour", "red")
    either = "<findQualifiers><findQualifier>orAllKeys</findQualifier></findQualifiers>"
    like = "<findQualifiers><findQualifier>orLikeKeys</findQualifier></findQualifiers>"
    assert await find_keys(uddi, f"<find_service>{bag(blue)}</find_service>")
    assert not await find_keys(uddi, f"<find_service>{bag(blue, red)}</find_service>")
    assert await find_keys(uddi, f"<find_service>{either}{bag(blue, red)}</find_service>")
    assert await find_keys(uddi, f"<find_service>{like}{bag(blue, red)}</find_service>")
    other = ("uddi:example.org:size", "a4")
    assert not await find_keys(uddi, f"<find_service>{like}{bag(blue, red, other)}</find_service>")
    subset = "<findQualifiers><findQualifier>{}</findQualifier></findQualifiers>"
    assert not await find_keys(uddi, f"<find_business>{bag(blue)}</find_business>")
    for word in ("serviceSubset", "combineCategoryBags"):
        assert await find_keys(uddi, f"<find_business>{subset.format(word)}{bag(blue)}</find_business>")
    fingerprint = "<tModelBag><tModelKey>uddi:example.org:IPP</tModelKey></tModelBag>"
    assert await find_keys(uddi, f"<find_binding>{fingerprint}</find_binding>") == ["uddi:example.org:t1"]
    assert await find_keys(uddi, f"<find_business>{fingerprint}</find_business>") == ["uddi:example.org:b1"]
    vat = '<identifierBag><keyedReference tModelKey="uddi:example.org:vat" keyValue="{}"/></identifierBag>'
    assert await find_keys(uddi, f"<find_business>{vat.format(7)}</find_business>")
    assert not await find_keys(uddi, f"<find_business>{vat.format(8)}</find_business>")


async def test_a_fingerprint_is_that_of_one_binding(uddi):
    token = await published(uddi)
    other = (
        '<businessService serviceKey="uddi:example.org:s2" businessKey="uddi:example.org:b1"><name>a4</name>'
        "<bindingTemplates><bindingTemplate><accessPoint>http://127.0.0.1:1/</accessPoint>"
        '<tModelInstanceDetails><tModelInstanceInfo tModelKey="uddi:example.org:size"/>'
        "</tModelInstanceDetails></bindingTemplate></bindingTemplates></businessService>"
    )
    await uddi.ask(f"<save_service>{token}{other}</save_service>")
    for search, keys in (("find_business", ["b1"]), ("find_service", ["s1", "s2"])):
        both = f"<{search}>{{}}{model_bag('ipp', 'size')}</{search}>"
        assert await find_keys(uddi, both.format("")) == []
        found = await find_keys(uddi, both.format(qualified("orAllKeys")))
        assert sorted(found) == [f"uddi:example.org:{key}" for key in keys]
    for search in (model_bag("size"), "<find_tModel><name>size</name></find_tModel>"):
        answer = await uddi.ask(f"<find_business>{search}</find_business>")
        shown = [info.get("serviceKey") for info in answer.walk() if info.local == "serviceInfo"]
        assert shown == ["uddi:example.org:s2"], "of the business, those with such a binding"
    inner = "<find_service>{}<find_tModel><name>{}</name></find_tModel></find_service>"
    assert await find_keys(uddi, inner.format(model_bag("ipp"), "ipp")) == ["uddi:example.org:s1"]
    assert await find_keys(uddi, inner.format(model_bag("ipp"), "size")) == [], "keys found are added"
    assert await find_keys(uddi, inner.format("", "no such")) == []
    blue = '<categoryBag><keyedReference tModelKey="uddi:example.org:colour" keyValue="blue"/></categoryBag>'
    either = f"<find_service>{qualified('orAllKeys')}{blue}{model_bag('size')}</find_service>"
    assert len(await find_keys(uddi, either)) == 2, "of both bags together"


async def test_a_business_shows_services_of_another_one(uddi):
    token = await published(uddi)
    shown = (
        '<businessServices><businessService serviceKey="uddi:example.org:s1" businessKey="{}"/>'
        "</businessServices>"
    )
    save = (
        f'<save_business>{token}<businessEntity businessKey="uddi:example.org:b2"><name>Two</name>{{}}'
        "</businessEntity></save_business>"
    )
    wrong = save.format(shown.format("uddi:example.org:b3"))
    assert await uddi.fault(wrong) == "E_invalidProjection"
    stub = '<businessService serviceKey="uddi:example.org:s1" businessKey="uddi:example.org:b1"/>'
    saved = await uddi.ask(save.format(f"<businessServices>{9 * stub}</businessServices>"))
    assert [node.get("businessKey") for node in saved.walk() if node.local == "businessService"] == [
        "uddi:example.org:b1"
    ]
    assert "Printer three" in str(saved), "its data are shown, not copied"
    of_two = '<find_service businessKey="uddi:example.org:b2">{}</find_service>'
    assert await find_keys(uddi, of_two.format("")) == ["uddi:example.org:s1"]
    assert await find_keys(uddi, of_two.format(qualified("suppressProjectedServices"))) == []
    by_name = "<find_service><name>Printer three</name></find_service>"
    assert await find_keys(uddi, by_name) == ["uddi:example.org:s1"]
    models = f"<find_business>{{}}{model_bag('ipp')}</find_business>"
    assert len(await find_keys(uddi, models.format(""))) == 2
    assert len(await find_keys(uddi, models.format(qualified("suppressProjectedServices")))) == 1
    two = "<find_business><name>Two</name></find_business>"
    assert "uddi:example.org:s1" in str(await uddi.ask(two))
    gone = f"<delete_business>{token}<businessKey>uddi:example.org:b2</businessKey></delete_business>"
    delete = f"<delete_service>{token}<serviceKey>uddi:example.org:s1</serviceKey></delete_service>"
    assert await uddi.say(delete) is None
    detail = await uddi.ask(
        "<get_businessDetail><businessKey>uddi:example.org:b2</businessKey></get_businessDetail>"
    )
    (left,) = [node for node in detail.walk() if node.local == "businessService"]
    assert (left.get("serviceKey"), left.children) == ("uddi:example.org:s1", [])
    assert await uddi.say(gone) is None


async def test_what_is_signed_is_found_with_what_it_contains(uddi):
    token = await published(uddi)
    business = (
        '<businessEntity businessKey="uddi:example.org:b4"><name>Signed</name><businessServices>'
        "<businessService{}><name>inside</name><bindingTemplates>"
        '<bindingTemplate bindingKey="uddi:example.org:t4">'
        "<accessPoint>http://127.0.0.1:1/</accessPoint></bindingTemplate></bindingTemplates></businessService>"
        f"</businessServices>{SIGNATURE}</businessEntity>"
    )
    save = f"<save_business>{token}{business}</save_business>"
    assert await uddi.fault(save.format("")) == "E_valueNotAllowed", "a new key would break the signature"
    saved = await uddi.ask(save.format(' serviceKey="uddi:example.org:s4"'))
    assert "SignatureValue" in str(saved)
    signed = qualified("signaturePresent")
    for search, key in (("find_business", "b4"), ("find_service", "s4"), ("find_binding", "t4")):
        assert await find_keys(uddi, f"<{search}>{signed}</{search}>") == [f"uddi:example.org:{key}"]
    model = f"<save_tModel>{token}<tModel><name>signed</name>{SIGNATURE}</tModel></save_tModel>"
    assert await uddi.fault(model) == "E_valueNotAllowed"


async def test_qualifiers_are_named_by_key_and_refused_where_they_do_not_apply(uddi):
    await published(uddi)
    prefix = "uddi:uddi.org:findqualifier:"
    by_key = qualified(f"{prefix}DiacriticsInsensitiveMatch", "uddi:uddi.org:sortorder:binarysort")
    assert await find_keys(uddi, f"<find_service>{by_key}<name>Prïnter three</name></find_service>")
    for search, name in (
        ("find_service", "serviceSubset"),
        ("find_tModel", "combineCategoryBags"),
        ("find_tModel", f"{prefix}bindingsubset"),
        ("find_binding", "suppressProjectedServices"),
        ("find_binding", "sortByNameAsc"),
    ):
        assert await uddi.fault(f"<{search}>{qualified(name)}</{search}>") == "E_unsupported", (search, name)
    inner = f"<find_tModel>{qualified('serviceSubset')}<name>x</name></find_tModel>"
    assert await uddi.fault(f"<find_service>{inner}</find_service>") == "E_unsupported"
    subset = (
        f"<find_business>{qualified('serviceSubset')}<categoryBag>"
        '<keyedReference tModelKey="uddi:example.org:colour" keyValue="{}"/></categoryBag></find_business>'
    )
    assert "uddi:example.org:s1" in str(await uddi.ask(subset.format("blue")))


REFERENCES = [
    ('<keyedReference tModelKey="uddi:example.org:none" keyValue="1"/>', "E_invalidKeyPassed"),
    ('<keyedReference tModelKey="" keyValue="1"/>', "E_invalidKeyPassed"),
    ('<keyedReferenceGroup tModelKey="uddi:example.org:none"/>', "E_invalidKeyPassed"),
    (f'<keyedReference tModelKey="uddi:example.org:size" keyValue="{"x" * 256}"/>', "E_valueNotAllowed"),
]


async def test_references_keys_languages_and_lengths_are_checked(uddi):
    token = await published(uddi)
    service = (
        f"<save_service>{token}<businessService{{}}><name{{}}>n</name>{{}}</businessService></save_service>"
    )
    for reference, code in REFERENCES:
        bag = f"<categoryBag>{reference}</categoryBag>"
        assert await uddi.fault(service.format("", "", bag)) == code, reference
    binding = "<bindingTemplates><bindingTemplate>{}</bindingTemplate></bindingTemplates>"
    for inside in (
        '<hostingRedirector bindingKey="uddi:example.org:none"/>',
        '<accessPoint useType="bindingTemplate">uddi:example.org:none</accessPoint>',
        "<accessPoint>x</accessPoint><tModelInstanceDetails><tModelInstanceInfo "
        'tModelKey="uddi:example.org:none"/></tModelInstanceDetails>',
    ):
        assert await uddi.fault(service.format("", "", binding.format(inside))) == "E_invalidKeyPassed"
    for inside in (
        '<hostingRedirector bindingKey="uddi:example.org:t1"/>',
        '<accessPoint useType="bindingTemplate">UDDI:example.org:t1</accessPoint>',
    ):
        assert (await uddi.ask(service.format("", "", binding.format(inside)))).local == "serviceDetail"
    many = "".join(f'<keyedReference tModelKey="uddi:m:{n}" keyValue="1"/>' for n in range(501))
    too_many = service.format("", "", f"<categoryBag>{many}</categoryBag>")
    assert await uddi.fault(too_many) == "E_tooManyOptions"
    for key in ("uddi:example..org:s", "uddi:-example.org:s", "uddi:example.org:keygenerator", "uddi:"):
        assert await uddi.fault(service.format(f' serviceKey="{key}"', "", "")) == "E_invalidKeyPassed", key
    for language in ("en", "1" * 26):
        await uddi.ask(service.format("", f' xml:lang="{language}"', ""))
    for language in ("no language", "1" * 27, "d-", "en_US"):
        assert await uddi.fault(service.format("", f' xml:lang="{language}"', "")) == "E_valueNotAllowed"
    marked = GENERATOR.replace("keygenerator", "printers")
    assert await uddi.fault(f"<save_tModel>{token}{marked}</save_tModel>") == "E_valueNotAllowed"
    stranger = await uddi.token("bob")
    inner = GENERATOR.replace("example.org:keygenerator", "example.org:a:keygenerator")
    assert await uddi.fault(f"<save_tModel>{stranger}{inner}</save_tModel>") == "E_keyUnavailable"
    assert (await uddi.ask(f"<save_tModel>{token}{inner}</save_tModel>")).local == "tModelDetail"


async def test_answers_come_in_pages_and_in_order(uddi):
    token = await uddi.token()
    services_ = "".join(f"<businessService><name>s{number}</name></businessService>" for number in (2, 0, 1))
    await uddi.ask(f"<save_service>{token}{services_}</save_service>")

    async def names(attributes: str, qualifier: str = "approximateMatch") -> list[str]:
        words = f"<findQualifier>approximateMatch</findQualifier><findQualifier>{qualifier}</findQualifier>"
        answer = await uddi.ask(
            f"<find_service {attributes}><findQualifiers>{words}</findQualifiers><name>s%</name>"
            "</find_service>"
        )
        counts = [child.text for child in answer.children[0].children]
        assert counts[1] == "3"
        assert (answer.get("truncated") == "true") == (attributes == 'maxRows="2"')
        return [node.text for node in answer.walk() if node.local == "name"]

    assert await names("", "sortByNameAsc") == ["s0", "s1", "s2"]
    assert await names('maxRows="2"', "sortByNameDesc") == ["s2", "s1"]
    assert await names('maxRows="2" listHead="3"', "sortByNameDesc") == ["s0"]
    assert await names('listHead="9"', "caseSensitiveSort") == []


async def test_saving_again_replaces_and_deleting_takes_what_is_inside(uddi):
    token = await published(uddi)
    await uddi.ask(
        f'<save_business>{token}<businessEntity businessKey="uddi:example.org:b1"><name>New</name>'
        "</businessEntity></save_business>"
    )
    request = "<get_serviceDetail><serviceKey>uddi:example.org:s1</serviceKey></get_serviceDetail>"
    assert await uddi.fault(request) == "E_invalidKeyPassed", "a service that is not in the new one is gone"
    await uddi.ask(f"<save_business>{token}{PRINTING}</save_business>")
    binding = f"<delete_binding>{token}<bindingKey>uddi:example.org:t1</bindingKey></delete_binding>"
    assert await uddi.say(binding) is None
    assert "bindingTemplate" not in str(await uddi.ask(request))
    gone = f"<delete_business>{token}<businessKey>uddi:example.org:b1</businessKey></delete_business>"
    assert await uddi.say(gone) is None
    assert await uddi.fault(request) == "E_invalidKeyPassed"
    assert not (await uddi.contexts.find("kind = 'service' OR kind = 'business'")).contexts


async def test_a_service_moves_to_another_business_of_the_same_request(uddi):
    token = await published(uddi)
    await uddi.ask(
        f'<save_business>{token}<businessEntity businessKey="uddi:example.org:b1"><name>One</name>'
        '</businessEntity><businessEntity businessKey="uddi:example.org:b2"><name>Two</name>'
        '<businessServices><businessService serviceKey="uddi:example.org:s1"><name>moved</name>'
        "</businessService></businessServices></businessEntity></save_business>"
    )
    of_two = '<find_service businessKey="uddi:example.org:b2"/>'
    assert await find_keys(uddi, of_two) == ["uddi:example.org:s1"]


async def test_a_binding_key_is_given_once_in_a_request(uddi):
    token = await published(uddi)
    service = (
        '<businessService businessKey="uddi:example.org:b1"><name>n</name><bindingTemplates>'
        '<bindingTemplate bindingKey="uddi:example.org:t2"><accessPoint>http://127.0.0.1:1/</accessPoint>'
        "</bindingTemplate></bindingTemplates></businessService>"
    )
    twice = f"<save_service>{token}{service * 2}</save_service>"
    assert await uddi.fault(twice) == "E_invalidKeyPassed"
    assert await find_keys(uddi, "<find_service><name>n</name></find_service>") == []


async def test_a_binding_can_be_saved_alone_and_moves(uddi):
    token = await published(uddi)
    (other,) = (
        await uddi.ask(
            f'<save_service>{token}<businessService businessKey="uddi:example.org:b1"><name>other</name>'
            "</businessService></save_service>"
        )
    ).children
    key = other.get("serviceKey")
    await uddi.ask(
        f'<save_binding>{token}<bindingTemplate bindingKey="uddi:example.org:t1" serviceKey="{key}">'
        "<accessPoint>http://127.0.0.1:1/moved</accessPoint></bindingTemplate></save_binding>"
    )
    by_service = f'<find_binding serviceKey="{key}"/>'
    assert await find_keys(uddi, by_service) == ["uddi:example.org:t1"]
    assert await find_keys(uddi, '<find_binding serviceKey="uddi:example.org:s1"/>') == []


async def test_a_deleted_model_is_hidden_and_comes_back_when_saved(uddi):
    token = await published(uddi)
    key = "<tModelKey>uddi:example.org:keygenerator</tModelKey>"
    assert await uddi.say(f"<delete_tModel>{token}{key}</delete_tModel>") is None
    find = "<find_tModel><name>keys of example.org</name></find_tModel>"
    assert await find_keys(uddi, find) == []
    detail = await uddi.ask(f"<get_tModelDetail>{key}</get_tModelDetail>")
    assert detail.children[0].get("deleted") == "true"
    hidden = await uddi.ask(f'<get_registeredInfo infoSelection="hidden">{token}</get_registeredInfo>')
    assert "keygenerator" in str(hidden)
    await uddi.ask(f"<save_tModel>{token}{GENERATOR}</save_tModel>")
    assert len(await find_keys(uddi, find)) == 1


async def test_what_is_mine_and_since_when(uddi):
    token = await published(uddi)
    mine = await uddi.ask(f'<get_registeredInfo infoSelection="all">{token}</get_registeredInfo>')
    assert "uddi:example.org:b1" in str(mine)
    assert "uddi:example.org:keygenerator" in str(mine)
    theirs = await uddi.ask(
        f'<get_registeredInfo infoSelection="all">{await uddi.token("bob")}</get_registeredInfo>'
    )
    assert theirs.children == []
    keys = "".join(
        f"<entityKey>uddi:example.org:{name}</entityKey>" for name in ("b1", "s1", "t1", "keygenerator")
    )
    infos = (await uddi.ask(f"<get_operationalInfo>{keys}</get_operationalInfo>")).children
    assert [info.text_of(U("authorizedName")) for info in infos] == ["ann"] * 4
    assert infos[0].text_of(U("modifiedIncludingChildren")) >= infos[0].text_of(U("created"))


async def two_publishers(uddi: Uddi) -> tuple[str, str, str, str]:
    """Their tokens, the key of the second one's business, and what relates the first one's to it."""
    token, other = await published(uddi), await uddi.token("bob")
    saved = await uddi.ask(
        f"<save_business>{other}<businessEntity><name>Paper</name></businessEntity></save_business>"
    )
    paper = saved.children[0].get("businessKey")
    output = (
        f"<publisherAssertion><fromKey>uddi:example.org:b1</fromKey><toKey>{paper}</toKey>"
        '<keyedReference tModelKey="uddi:uddi.org:relationships" keyName="buys" keyValue="peer-peer"/>'
        "</publisherAssertion>"
    )
    assert paper is not None
    return token, other, paper, output


async def test_relations_are_valid_when_both_sides_asserted_them(uddi):
    token, other, paper, output = await two_publishers(uddi)
    related = (
        "<find_relatedBusinesses><businessKey>uddi:example.org:b1</businessKey></find_relatedBusinesses>"
    )
    status = "<get_assertionStatusReport>{}</get_assertionStatusReport>"
    assert await uddi.say(f"<add_publisherAssertions>{token}{output}</add_publisherAssertions>") is None
    assert len((await uddi.ask(related)).children) == 2, "one side alone makes no relation"
    report = await uddi.ask(status.format(other))
    assert report.children[0].get("completionStatus") == "status:toKey_incomplete"
    both = await uddi.ask(f"<set_publisherAssertions>{other}{output}</set_publisherAssertions>")
    assert both.local == "publisherAssertions"
    assert paper in str(await uddi.ask(related))
    report = await uddi.ask(status.format(token))
    assert report.children[0].get("completionStatus") == "status:complete"
    mine = await uddi.ask(f"<get_publisherAssertions>{token}</get_publisherAssertions>")
    assert len(mine.children) == 1
    again = f"<delete_publisherAssertions>{token}{output}</delete_publisherAssertions>"
    assert await uddi.say(again) is None
    assert await uddi.fault(again) == "E_assertionNotFound"
    assert len((await uddi.ask(related)).children) == 2


async def test_what_is_written_by_hand_is_not_taken_for_anothers_word(uddi):
    """Every client of the domain may write contexts, under the prefixes of UDDI as well."""
    token, _, paper, output = await two_publishers(uddi)
    await uddi.say(f"<add_publisherAssertions>{token}{output}</add_publisherAssertions>")
    service = (
        '<businessService xmlns="{}" serviceKey="{}" businessKey="uddi:example.org:b1"><name>forged</name>'
    )
    forged = {
        "service/h": ("service", service.format(U, "uddi:h") + "</businessService>"),  # in ann's business
        "service/i": ("service", service.format(U, "uddi:example.org:s1") + "</businessService>"),
        "service/j": ("service", "no XML"),
        "uddi/business/uddi:h": (
            "business",
            f'<businessEntity xmlns="{U}" businessKey="uddi:example.org:b1"><name>forged</name>'
            "</businessEntity>",
        ),
        "uddi/assertion/a/bob": ("assertion", output.replace("Assertion>", f'Assertion xmlns="{U}">', 1)),
        "uddi/assertion/b/bob": ("assertion", "no XML"),
        "uddi/assertion/c/bob": ("assertion", f'<name xmlns="{U}">forged</name>'),
    }
    words = {"business": "uddi:example.org:b1", "from_business": "uddi:example.org:b1", "publisher": "bob"}
    for key, (kind, value) in forged.items():
        await uddi.contexts.put(key, value.encode(), attributes={**words, "kind": kind, "uddi": True})
    await uddi.services.save(
        service_entries.ServiceEntry(id="k", name="lost", metadata={"lon": "west", "lat": 1})
    )

    anything = (
        "<findQualifiers><findQualifier>approximateMatch</findQualifier></findQualifiers><name>%</name>"
    )
    box = "".join(
        f'<keyedReference tModelKey="uddi:muster:boundingbox" keyName="{side}" keyValue="1"/>'
        for side in ("minX", "minY", "maxX", "maxY")
    )
    group = f'<keyedReferenceGroup tModelKey="uddi:muster:boundingbox">{box}</keyedReferenceGroup>'
    business = "<businessKey>uddi:example.org:b1</businessKey>"
    assert await find_keys(uddi, f"<find_service>{anything}</find_service>") == [
        "uddi:example.org:s1",
        "uddi:k",
    ]
    assert await find_keys(uddi, f"<find_service><categoryBag>{group}</categoryBag></find_service>") == []
    for request in (
        f"<find_business>{anything}</find_business>",
        f"<get_businessDetail>{business}</get_businessDetail>",
    ):
        assert "forged" not in str(await uddi.ask(request))
    for key in ("h", "i", "j"):
        request = f"<get_serviceDetail><serviceKey>uddi:{key}</serviceKey></get_serviceDetail>"
        assert await uddi.fault(request) == "E_invalidKeyPassed"
    related = await uddi.ask(f"<find_relatedBusinesses>{business}</find_relatedBusinesses>")
    assert paper not in str(related), "bob has not asserted it"
    report = await uddi.ask(f"<get_assertionStatusReport>{token}</get_assertionStatusReport>")
    assert [child.get("completionStatus") for child in report.children] == ["status:toKey_incomplete"]
    assert await uddi.say(f"<delete_business>{token}{business}</delete_business>") is None


async def test_owners_keys_and_tokens(uddi):
    token, other = await published(uddi), await uddi.token("bob")
    save = "<save_business>{}<businessEntity{}><name>x</name></businessEntity></save_business>"
    key = ' businessKey="uddi:example.org:{}"'
    before = await uddi.contexts.find("kind = 'business'")
    assert await uddi.fault(save.format("", "")) == "E_authTokenRequired"
    assert await uddi.fault(save.format("<authInfo>made up</authInfo>", "")) == "E_authTokenRequired"
    assert await uddi.fault(save.format(other, key.format("b1"))) == "E_userMismatch"
    assert await uddi.fault(save.format(other, key.format("b2"))) == "E_keyUnavailable"
    assert await uddi.fault(save.format(token, ' businessKey="uddi:elsewhere.org:b"')) == "E_keyUnavailable"
    assert await uddi.fault(save.format(token, ' businessKey="no key"')) == "E_invalidKeyPassed"
    delete = f"<delete_service>{other}<serviceKey>uddi:example.org:s1</serviceKey></delete_service>"
    assert await uddi.fault(delete) == "E_userMismatch"
    assert await uddi.fault('<get_authToken userID="ann" cred="wrong"/>') == "E_unknownUser"
    assert await uddi.say(f"<discard_authToken>{other}</discard_authToken>") is None
    assert await uddi.fault(save.format(other, "")) == "E_authTokenExpired"
    uddi.clock.ahead_s = 2_000
    assert await uddi.fault(save.format(token, "")) == "E_authTokenExpired"
    assert [context.version for context in (await uddi.contexts.find("kind = 'business'")).contexts] == [
        context.version for context in before.contexts
    ]


WRONG = [
    ("<find_business/>", "E_fatalError"),
    ("<find_service><name/></find_service>", "E_valueNotAllowed"),
    (f"<find_service><name>{'x' * 256}</name></find_service>", "E_valueNotAllowed"),
    ("<find_service><tModelBag/></find_service>", "E_valueNotAllowed"),
    ('<find_service maxRows="many"><name>x</name></find_service>', "E_valueNotAllowed"),
    ("<find_service><other/></find_service>", "E_valueNotAllowed"),
    ("<get_all/>", "E_unsupported"),
    (
        "<find_service><findQualifiers><findQualifier>best</findQualifier></findQualifiers></find_service>",
        "E_unsupported",
    ),
    (
        "<find_service><findQualifiers><findQualifier>exactMatch</findQualifier><findQualifier>"
        "approximateMatch</findQualifier></findQualifiers><name>x</name></find_service>",
        "E_invalidCombination",
    ),
    (
        "<find_service><findQualifiers><findQualifier>exactMatch</findQualifier><findQualifier>"
        "exactmatch</findQualifier></findQualifiers><name>x</name></find_service>",
        "E_valueNotAllowed",
    ),
    ('<find_service businessKey="uddi:no:such"/>', "E_invalidKeyPassed"),
    ('<find_binding serviceKey="uddi:no:such"/>', "E_invalidKeyPassed"),
    ("<get_tModelDetail><tModelKey>uddi:no:such</tModelKey></get_tModelDetail>", "E_invalidKeyPassed"),
    (
        "<get_serviceDetail><serviceKey>uddi:a</serviceKey><serviceKey>uddi:A</serviceKey></get_serviceDetail>",
        "E_invalidKeyPassed",
    ),
]


async def test_what_is_wrong_gets_its_code(uddi):
    for body, code in WRONG:
        assert await uddi.fault(body) == code, body


async def test_of_a_save_with_one_fault_nothing_is_written(uddi):
    token = await published(uddi)
    sides = "".join(
        f'<keyedReference tModelKey="uddi:muster:boundingbox" keyName="{side}" keyValue="far"/>'
        for side in ("minX", "minY", "maxX", "maxY")
    )
    many = "".join(
        f'<keyedReference tModelKey="{KEYWORDS}" keyName="k{number}" keyValue="{"v" * 200}"/>'
        for number in range(99)
    )
    service = "<businessService><name>{}</name><categoryBag>{}</categoryBag></businessService>"
    good = service.format("good", many[: many.index("/>") + 2])
    for wrong, code in (
        (
            f'<keyedReferenceGroup tModelKey="uddi:muster:boundingbox">{sides}</keyedReferenceGroup>',
            "E_invalidValue",
        ),
        (
            '<keyedReference tModelKey="uddi:muster:lease" keyName="lease_s" keyValue="-1"/>',
            "E_valueNotAllowed",
        ),
        (many, "E_messageTooLarge"),
    ):
        request = f"<save_service>{token}{good}{service.format('bad', wrong)}</save_service>"
        assert await uddi.fault(request) == code
    assert await find_keys(uddi, "<find_service><name>good</name></find_service>") == []


async def test_each_port_answers_only_its_own(uddi):
    assert await uddi.fault('<get_authToken userID="a" cred="b"/>', "/uddi/inquiry") == "E_unsupported"
    assert await uddi.fault("<find_business/>", "/juddiv3/services/publish") == "E_unsupported"
    assert (
        await uddi.ask("<find_business><name>x</name></find_business>", "/juddiv3/services/inquiry")
    ).local


BOMB = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "boom"}">' for n in range(10))
HOSTILE = [
    (f"<!DOCTYPE x [{BOMB}]><x>&e9;</x>", "document type"),
    ('<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>', "document type"),
    ('<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>', "document type"),
    ("<x", "not XML"),
    ("<x/>", "not a SOAP envelope"),
    (
        '<e:Envelope xmlns:e="http://www.w3.org/2003/05/soap-envelope"><e:Body/></e:Envelope>',
        "VersionMismatch",
    ),
    ("<a>" * 100 + "</a>" * 100, "nested deeper"),
    (f"<a>{'a' * (1 << 20)}</a>", "E_messageTooLarge"),
]


async def test_hostile_envelopes_are_refused(uddi):
    for body, words in HOSTILE:
        response = await uddi.post("/uddi", body)
        assert (response.status_code, words in response.text) == (500, True), response.text
    assert (await uddi.contexts.find("key LIKE '%'")).contexts == [], "and nothing changed"


async def test_the_endpoint_describes_itself(uddi):
    response = await uddi.http.get(f"{uddi.url}/uddi/inquiry?wsdl")
    assert f"{uddi.url}/uddi/publication" in response.text
    binding = f"{uddi.url}/uddi/oasis/uddi_api_v3_binding.wsdl"
    assert binding in response.text
    assert "uddi_api_v3_portType.wsdl" in (await uddi.http.get(binding)).text
    for path, file in wsdl.FILES.items():
        assert (await uddi.http.get(f"{uddi.url}/uddi{path}")).content == file.read_bytes()
    assert await uddi.fault("<find_business/>", "/uddi/oasis/uddi_v3.xsd") == "E_unsupported"
