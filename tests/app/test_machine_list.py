"""What follows from the list of a domain's machines, and their admission without brokers."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import msgspec
import pytest

from muster.app import certificates, enrolment, home, identities
from muster.app import settings as app_settings
from muster.app.components import management
from muster.app.machines import admission, follower, join_client, membership
from muster.app.machines import roles as machine_roles
from muster.core import errors
from muster.core.settings import bus, domain, loader
from muster.trust import certificates as certificates_
from muster.trust import machine_keys, nkeys, sealed_box
from muster.trust.permissions import roles

pytestmark = pytest.mark.may_block(reason="keys are written by this thread")


def machine(name: str, *, stores: bool = False, broker: bool = True) -> membership.Machine:
    return membership.Machine(
        name=name,
        roles=machine_roles.ALL,
        address=f"10.0.0.{ord(name)}",
        since_s=0.0,
        broker=f"fleet-{name}" if broker else "",
        stores=stores,
    )


def listed(*machines: membership.Machine) -> membership.MachineList:
    return membership.MachineList(own="a", machines=machines)


def test_brokers_share_the_storage_from_the_third_on_and_one_after_the_other():
    two = listed(machine("a", stores=True), machine("b"))
    assert two.next_to_store(["fleet-a"]) is None
    assert two.replicas == 1
    assert two.unreplicated().endswith("with 3 brokers, and this domain has 2")
    three = two.put(machine("c"))
    following = three.next_to_store(["fleet-a"])
    assert following is not None
    assert following.name == "b"
    growing = three.put(msgspec.structs.replace(following, stores=True))
    assert growing.next_to_store(["fleet-a"]) is None  # b is not current yet
    last = growing.next_to_store(["fleet-b", "fleet-a"])
    assert last is not None
    assert last.name == "c"
    assert growing.put(msgspec.structs.replace(last, stores=True)).replicas == 3
    with_fourth = three.put(machine("d", broker=False))
    assert with_fourth.brokers == three.brokers


def test_a_broker_that_is_not_of_a_machine_any_more_is_struck():
    known = listed(machine("a", stores=True), machine("b", stores=True), machine("c", stores=True))
    assert known.without("c").lost(["fleet-a", "fleet-b", "fleet-c"]) == ["fleet-c"]
    assert known.lost(["fleet-a", "fleet-b"]) == []


def test_roles_are_named():
    with pytest.raises(errors.InvalidInput, match="'brokr' is not a role"):
        machine_roles.check(["brokr"])
    assert machine_roles.check(["agent", "broker"]) == ("broker", "agent")


@pytest.mark.parametrize("name", ["local", "message", "a b", "web"])
def test_a_machine_cannot_have_the_name_of_a_part_of_the_domain(name: str):
    with pytest.raises((errors.Conflict, errors.InvalidInput)):
        membership.check_name(name)


class Signing:
    """The machine that signs accounts."""

    def __init__(self, folder: Path) -> None:
        self.settings = app_settings.Settings(
            domain=domain.DomainSettings(name="fleet", data_dir=str(folder)),
            bus=bus.BusSettings(host="10.0.0.1", port=4222, route_port=6222),
        )
        self.trust = identities.open_or_create(self.settings)
        certificates.ensure_authority(self.settings)
        membership.at_start(self.settings, self.settings.domain.folder)
        self.admission = admission.MachineAdmission(self.settings, self.trust)


def request(name: str, keys: dict[str, nkeys.KeyPair], box: sealed_box.SealedBoxKey) -> admission.JoinRequest:
    return admission.JoinRequest(
        name=name,
        address="10.0.0.2",
        zone=name,
        keys={identity: key.public for identity, key in keys.items()},
        box=box.public,
    )


def new_keys(name: str, chosen: tuple[str, ...] = machine_roles.ALL) -> dict[str, nkeys.KeyPair]:
    parts = membership.parts(name, chosen, name)
    return {identity: nkeys.KeyPair.create(nkeys.KeyKind.USER) for identity in parts}


def test_a_machine_gets_what_its_roles_need_and_no_key_that_signs(tmp_path: Path):
    first, box = Signing(tmp_path / "a"), sealed_box.SealedBoxKey.create()
    agent_only = new_keys("c", ("agent",))
    joined = first.admission.join(("agent",), request("c", agent_only, box))
    assert (joined.secrets, joined.certificate, joined.machines.here.broker) == ("", "", "")
    folder = domain.DomainSettings(name="fleet", data_dir=str(tmp_path / "c"))
    settings = app_settings.Settings(domain=folder)
    trust = machine_keys.adopt(settings.keys_folder, "fleet", joined.documents)
    for identity, role in membership.parts("c", ("agent",), "c").items():
        machine_keys.store_own(trust, identity, role, joined.users[identity], agent_only[identity])
    assert identities.open_or_create(settings).domain == "fleet"  # it needs nothing else
    keys = new_keys("b")
    joined = first.admission.join(machine_roles.ALL, request("b", keys, box))
    again = first.admission.join(machine_roles.ALL, request("b", keys, box))  # the reply was lost
    assert (again.machines, set(again.users)) == (joined.machines, set(keys))
    trust = machine_keys.adopt(tmp_path / "b", "fleet", joined.documents)
    for identity, role in membership.parts("b", machine_roles.ALL, "b").items():
        machine_keys.store_own(trust, identity, role, joined.users[identity], keys[identity])
    machine_keys.open_secrets(trust, joined.secrets, box, "b")
    assert trust.missing_files() == []
    assert trust.key_of_secrets().public == first.trust.key_of_secrets().public
    assert not list((tmp_path / "b").rglob("*.seed"))
    assert identities.credentials(trust, "message", roles.Role.GATEWAY).seed == keys["message"].seed
    assert trust.show("c").role == roles.Role.AGENT
    with pytest.raises(errors.NotFound, match="without credentials for 'pipeline'"):
        identities.credentials_file(trust, "pipeline", roles.Role.PIPELINE)
    with pytest.raises(errors.InvalidInput):
        sealed_box.SealedBoxKey.create().open(joined.secrets, "secrets.key b")


def test_other_keys_need_another_name_until_the_machine_is_removed(tmp_path: Path):
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    keys = new_keys("b")
    first.admission.join(machine_roles.ALL, request("b", keys, box))
    with pytest.raises(errors.Conflict, match="has a machine 'b' already"):
        first.admission.join(machine_roles.ALL, request("b", new_keys("b"), box))
    removed = first.admission.remove("b")
    assert removed.name == "b"
    assert first.trust.show("registry-b-1").status == "revoked"
    revoked = first.trust.newest_account([]).nats.revocations  # type: ignore[union-attr]
    assert keys["message"].public in revoked
    first.admission.join(machine_roles.ALL, request("b", new_keys("b"), box))
    assert first.trust.show("registry-b-1").status == "valid"
    with pytest.raises(errors.Refused, match="signs accounts"):
        first.admission.remove("local")


def test_a_part_that_all_machines_have_is_revoked_with_all_its_keys(tmp_path: Path):
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    keys = new_keys("b")
    first.admission.join(machine_roles.ALL, request("b", keys, box))
    first.trust.revoke("admin")
    revoked = first.trust.newest_account([]).nats.revocations  # type: ignore[union-attr]
    assert {first.trust.show("admin").public_key, keys["admin"].public} <= set(revoked)


def test_keys_that_do_not_fit_the_roles_are_refused(tmp_path: Path):
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    with pytest.raises(errors.InvalidInput, match="its roles need"):
        first.admission.join(("agent",), request("b", new_keys("b"), box))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"address": "10.0.0.2:4222"}, "neither an address nor a host name"),
        ({"address": 'b"{}'}, "neither an address nor a host name"),
        ({"address": "fe80::1%eth0"}, "valid on one machine only"),
        ({"address": "10.0.0.1"}, "local has the address"),
        ({"port": 0}, "0 is not a port"),
        ({"route_port": 65536}, "65536 is not a port"),
        ({"box": "x"}, "not base64"),
        ({"certificate_key": "x"}, "not a public key"),
        ({"zone": "../x"}, "cannot be a name"),
        ({"name": "../x"}, "cannot be a name"),
    ],
)
def test_a_refused_request_changes_neither_the_list_nor_the_keys(
    tmp_path: Path, wrong: dict[str, object], reason: str
):
    """The list becomes the configuration of all brokers."""
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    asked = msgspec.structs.replace(request("b", new_keys("b"), box), **wrong)
    with pytest.raises(errors.MusterError, match=reason):
        first.admission.join(machine_roles.ALL, asked)
    assert [known.name for known in first.admission.machines().machines] == ["local"]
    assert machine_keys.MachineKeys(first.trust).of("b") == {}


def test_a_machine_brings_keys_of_its_own(tmp_path: Path):
    """Its removal revokes them, so it must not name those of others, nor get documents for more of them."""
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    keys = {identity: key.public for identity, key in new_keys("b").items()}
    asked = request("b", {}, box)

    def refused(error: type[errors.MusterError], **different: str) -> None:
        with pytest.raises(error):
            first.admission.join(machine_roles.ALL, msgspec.structs.replace(asked, keys=keys | different))

    refused(errors.Refused, bootstrap=first.trust.show("bootstrap").public_key)
    refused(errors.InvalidInput, bootstrap=keys["admin"])
    first.admission.join(machine_roles.ALL, msgspec.structs.replace(asked, keys=keys))
    another = nkeys.KeyPair.create(nkeys.KeyKind.USER).public
    refused(errors.Conflict, admin=another)
    refused(errors.Conflict, system=another)
    first.admission.remove("b")
    refused(errors.Refused)
    revoked = first.trust.newest_account([]).nats.revocations  # type: ignore[union-attr]
    assert set(keys.values()) - set(revoked) == {keys["system"]}  # that one is in the brokers' own account


@pytest.mark.parametrize("name", ["alice", "channel-b", "registry-1"])
def test_a_machine_does_not_get_the_name_of_another_identity(tmp_path: Path, name: str):
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    for identity, role in (("alice", roles.Role.VIEWER), ("registry-1", roles.Role.REGISTRY)):
        first.trust.issue(identity, role)
    first.admission.join(machine_roles.ALL, request("b", new_keys("b"), box))
    with pytest.raises(errors.Conflict, match=f"an identity '{name}' already"):
        first.admission.join(("agent",), request(name, new_keys(name, ("agent",)), box))
    assert machine_keys.MachineKeys(first.trust).of(name) == {}


def test_a_join_that_a_crash_interrupted_is_completed_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    store, keys = first.trust.store_user, new_keys("b")

    def crash(domain: str, identity: str, *rest: object) -> str:
        if identity == "manager-b-1":
            raise RuntimeError("power cut")
        return store(domain, identity, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(first.trust, "store_user", crash)
        with pytest.raises(RuntimeError):
            first.admission.join(machine_roles.ALL, request("b", keys, box))
    interrupted = machine_keys.MachineKeys(first.trust).of("b")
    assert "manager-b-1" in interrupted
    joined = first.admission.join(machine_roles.ALL, request("b", keys, box))
    assert set(joined.users) == set(keys)
    (tmp_path / "fleet" / membership.FILE).write_bytes(
        msgspec.json.encode(first.admission.machines().without("b"))
    )
    first.admission.join(machine_roles.ALL, request("b", new_keys("b"), box))  # its home was lost
    assert first.trust.show("manager-b-1").public_key != keys["manager-b-1"].public
    assert keys["bootstrap"].public in first.trust.newest_account([]).nats.revocations  # type: ignore[union-attr]


def test_a_machine_that_is_removed_meanwhile_does_not_return_as_a_store():
    three = listed(machine("a", stores=True), machine("b"), machine("c"))
    following = three.next_to_store(["fleet-a"])
    assert following is not None
    assert three.without("b").with_storing(following) == three.without("b")
    assert three.with_storing(following).storing[-1].name == "b"


def test_a_request_with_another_name_has_the_key_to_which_the_token_is_bound(tmp_path: Path):
    first = join_client._keys(tmp_path, list(membership.parts("b", ("agent",), "b")))
    second = join_client._keys(tmp_path, list(membership.parts("b2", ("agent",), "b2")))
    assert second["bootstrap"].seed == first["bootstrap"].seed
    assert set(second) == {"bootstrap", "admin", "b2", "sensor-b2"}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"address": "no..host"}, "'no..host' does not resolve"),
        ({"listen": "192.0.2.1"}, "cannot listen on 192.0.2.1, port 0"),
    ],
)
async def test_a_broker_that_could_not_listen_is_refused_before_the_token_is_used(
    tmp_path: Path, wrong: dict[str, str], reason: str
):
    """The domain would know a machine then that never starts."""
    address = {"address": "127.0.0.1", "listen": "127.0.0.1"} | wrong
    choices = join_client.JoinChoices(name="b", zone="b", port=0, route_port=0, **address)
    token = enrolment.EnrolmentToken(
        servers=("tls://192.0.2.1:4222",), creds="", name="", expires_at_s=0.0, roles=("broker",)
    )
    with pytest.raises(errors.MusterError, match=reason):
        await join_client.join(home.Home(tmp_path / "b"), token, choices, waiting=print)
    assert not (tmp_path / "b").exists()


def test_only_the_owner_reads_the_home_of_a_machine_that_joins(tmp_path: Path):
    join_client._keys(tmp_path / "home" / join_client.DRAFT, ["bootstrap"])
    assert (tmp_path / "home").stat().st_mode & 0o077 == 0


def test_a_gateway_checks_logins_and_its_documents_end_with_them(tmp_path: Path):
    first, box = Signing(tmp_path / "a"), sealed_box.SealedBoxKey.create()
    chosen, key = ("gateway",), nkeys.KeyPair.create(nkeys.KeyKind.USER).public
    joined = first.admission.join(chosen, request("b", new_keys("b", chosen), box))
    trust = machine_keys.adopt(tmp_path / "b", "fleet", joined.documents)
    assert first.admission.page("b", -1, "", trust.passwords().digest()).logins is None
    first.trust.passwords().set("alice", roles.Role.USER, "correct horse")
    first.trust.passwords().set("bob", roles.Role.USER, "battery staple")
    page = first.admission.page("b", joined.documents.after, "", trust.passwords().digest())
    assert page.logins is not None
    machine_keys.adopt(tmp_path / "b", "fleet", page.documents)
    trust.passwords().adopt(page.logins)
    assert trust.passwords().check("alice", "correct horse").role is roles.Role.USER
    assert first.admission.page("b", -1, "", trust.passwords().digest()).logins is None
    first.trust.passwords().remove("bob")
    page = first.admission.page("b", -1, "", trust.passwords().digest())
    trust.passwords().adopt(page.logins or {})
    assert trust.passwords().names() == ["alice"]
    with pytest.raises(errors.Refused, match="on the machine that signs"):
        trust.passwords().set("alice", roles.Role.USER, "another password")
    with pytest.raises(errors.Refused, match="on the machine that signs"):
        trust.passwords().remove("alice")
    with pytest.raises(errors.Refused, match="has no keys that sign"):
        trust.issue("carol", roles.Role.USER)
    with pytest.raises(errors.Refused, match="has no keys that sign"):
        trust.revoke("alice")
    assert trust.passwords().check("alice", "correct horse").role is roles.Role.USER

    document = first.admission.login("b", "alice", "viewer", key)
    assert first.trust.check(document).name == "alice"
    machine_keys.adopt(tmp_path / "b", "fleet", machine_keys.MachineKeys(first.trust).documents())
    assert trust.check(document).sub == key
    with pytest.raises(errors.Refused, match="needs its own key"):
        first.admission.login("b", "admin", "viewer", key)
    first.trust.revoke("alice")
    with pytest.raises(errors.Unauthorized, match="revoked"):
        first.trust.check(document)
    with pytest.raises(errors.Unauthorized, match="are revoked"):
        first.admission.login("b", "alice", "viewer", nkeys.KeyPair.create(nkeys.KeyKind.USER).public)
    other = nkeys.KeyPair.create(nkeys.KeyKind.USER).public
    document = first.admission.login("b", "admin", "viewer", other)
    first.admission.remove("b")
    with pytest.raises(errors.Unauthorized, match="revoked"):
        first.trust.check(document)
    first.admission.join(("agent",), request("c", new_keys("c", ("agent",)), box))
    with pytest.raises(errors.Forbidden, match="'c' has no gateway"):
        first.admission.login("c", "admin", "viewer", nkeys.KeyPair.create(nkeys.KeyKind.USER).public)


async def test_the_first_machine_is_listed_with_what_it_runs(tmp_path: Path):
    flags = {
        "domain.data_dir": str(tmp_path),
        "bus.host": "127.0.0.1",
        "bus.tls": "on",
        "bus.route_port": 6222,
    }
    settings = loader.load(app_settings.Settings, flags=flags | {"bus.port": 4222})
    folder = settings.domain.folder
    usual = ("broker", "registry", "manager", "information-node", "agent")
    first = membership.at_start(settings, folder)
    assert first is not None
    assert first.here.roles == usual
    more = {"bus.port": 4222, "amqp.enabled": True, "manage.registries": 0}
    later = membership.at_start(loader.load(app_settings.Settings, flags=flags | more), folder)
    assert later is not None
    assert later.here.roles == ("broker", "manager", "information-node", "gateway", "agent")


async def test_a_machine_requests_nothing_in_the_name_of_another(tmp_path: Path):
    """It would keep that when it is removed: what another has is not revoked then."""
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    chosen = ("gateway",)
    keys = {name: new_keys(name, chosen) for name in "bc"}
    joined = [first.admission.join(chosen, request(name, own, box)) for name, own in keys.items()][-1]
    words = "certificate", "c", "KEY"
    seeds = {name: own["bootstrap"].seed for name, own in keys.items()}
    first.admission.check_signed("c", machine_keys.signed(seeds["c"], *words), *words)
    for machine, proof in (
        ("c", machine_keys.signed(seeds["b"], *words)),
        ("c", machine_keys.signed(seeds["c"], "certificate", "c", "OTHER")),
        ("c", "no signature"),
        ("c", ""),
        ("local", machine_keys.signed(seeds["c"], *words)),
        ("no/machine", machine_keys.signed(seeds["c"], *words)),
    ):
        with pytest.raises(errors.Forbidden, match="is not signed with a key of"):
            first.admission.check_signed(machine, proof, *words)
    requests = management.ManagementComponent(app_settings.Settings().manage)
    requests._admission = first.admission
    for certificate_key, logins in (("KEY", ""), ("", "DIGEST")):
        proof = machine_keys.signed(seeds["b"], "directory", "c", certificate_key, logins)
        with pytest.raises(errors.Forbidden, match="is not signed with a key of 'c'"):
            await requests._directory("c", certificate_key=certificate_key, logins=logins, proof=proof)
    first.trust.passwords().set("alice", roles.Role.USER, "correct horse")
    for logins in ("", "DIGEST"):  # also those of machines that are not upgraded yet: the page is not refused
        page = await requests._directory("c", logins=logins)
        assert page.logins is None, "a request that is not signed gets no verifiers"
    proof = machine_keys.signed(seeds["b"], *words)
    with pytest.raises(errors.Forbidden, match="is not signed with a key of 'c'"):
        await requests._login("c", "alice", "viewer", "KEY", proof)
    trust = machine_keys.adopt(tmp_path / "c", "fleet", joined.documents)
    key, own = certificates_.CertificateKey(), keys["c"]["bootstrap"]
    machine_keys.store_own(trust, "bootstrap", roles.Role.BOOTSTRAP, joined.users["bootstrap"], own)
    followed = follower.MachineFollower(joined.machines, mock.Mock(), mock.Mock())
    followed._context = mock.Mock(trust=trust)
    proof = followed._sign(key.public, "DIGEST")
    page = await requests._directory("c", certificate_key=key.public, logins="DIGEST", proof=proof)
    assert page.certificate
    assert page.logins


def test_brokers_admit_the_certificates_of_machines_only(tmp_path: Path):
    first, box = Signing(tmp_path), sealed_box.SealedBoxKey.create()
    folder = first.settings.domain.folder
    assert first.admission.machines().pins == ()
    membership.update(folder, lambda known: known.with_pin("local", "aa"))
    made = request("b", new_keys("b"), box)
    first.admission.join(machine_roles.ALL, made)
    assert first.admission.machines().pins == (), "without a certificate of each, none is pinned"
    first.admission.page("b", -1, certificates_.CertificateKey().public, "")
    pins = first.admission.machines().pins
    assert len(pins) == 2
    first.admission.page("b", -1, certificates_.CertificateKey().public, "")
    assert len(first.admission.machines().pins) == 3, "the former one is admitted until the next"
    first.admission.page("b", -1, certificates_.CertificateKey().public, "")
    assert len(first.admission.machines().pins) == 3
    first.admission.remove("b")
    assert first.admission.machines().pins == ("aa",)
