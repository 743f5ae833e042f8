import itertools
import os
import pathlib
import shutil
import stat
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.app import identities
from muster.core import errors
from muster.core.settings import bus as bus_settings
from muster.testing.eventually import eventually
from muster.trust import credential_records, credentials, jwt, keyring, machine_keys, nkeys, private_files
from muster.trust.permissions import roles
from tests.trust import servers

AGENT = roles.Role.AGENT


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Made once: every file of it is synced."""
    return keyring.Keyring.create(tmp_path_factory.mktemp("template") / "keys", "north")


@pytest.fixture
def trust(template, tmp_path):
    shutil.copytree(template.folder, tmp_path / "keys")
    return keyring.Keyring.open(tmp_path / "keys")


def test_everything_is_private_and_nothing_half_written(trust):
    trust.issue("a1", AGENT)
    for path in [trust.folder, *trust.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert path == trust.folder or not path.name.startswith("."), path
    assert [path.name for path in trust.folder.parent.iterdir()] == ["keys"]


def test_keys_are_not_made_twice(trust):
    with pytest.raises(errors.AlreadyExists):
        keyring.Keyring.create(trust.folder, "north")


def test_a_failed_creation_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(errors.Refused, match="No space"):
        keyring.Keyring.create(tmp_path / "keys", "north")
    assert not list(tmp_path.iterdir())


def test_opening_finds_what_was_there(trust):
    trust.issue("a1", AGENT, lifetime_s=60)
    again = keyring.Keyring.open(trust.folder)
    assert again.domain == "north"
    assert again.show("a1") == trust.show("a1")
    assert again.broker() == trust.broker()
    with pytest.raises(errors.NotFound, match="no keys") as caught:
        keyring.Keyring.open(trust.folder / "elsewhere")
    assert "muster init" in str(caught.value.hint)


def test_a_record_contains_identity_rights_and_expiry(trust):
    trust.issue("a1", AGENT, lifetime_s=60)
    record = trust.show("a1")
    assert (record.role, record.status, record.domain) == ("agent", "valid", "north")
    assert record.expires_at == record.issued_at + 60
    assert "muster.*.from.a1.>" in record.publish
    assert trust.records() == [record]
    with pytest.raises(errors.NotFound, match="a2"):
        trust.show("a2")
    with pytest.raises(errors.NotFound, match="west"):
        trust.show("a1", domain="west")


@pytest.mark.parametrize("name", ["", "a.b", "a*", ">", "../x", "a/b", "é", "a" * 129, "a b", "a\n"])
def test_a_name_that_is_no_token_is_refused(trust, name):
    with pytest.raises(errors.InvalidInput):
        trust.issue(name, AGENT)
    with pytest.raises(errors.InvalidInput):
        trust.show(name)
    with pytest.raises(errors.InvalidInput):
        trust.add_domain(name)


def test_the_brokers_account_is_for_brokers(trust):
    for act in (
        lambda: trust.add_domain("SYS"),
        lambda: trust.issue("a1", AGENT, domain="SYS"),
        lambda: trust.issue("s1", roles.Role.SYSTEM, domain="north"),
        lambda: keyring.Keyring.create(trust.folder / "x", "SYS"),
    ):
        with pytest.raises(errors.InvalidInput):
            act()
    trust.issue("s1", roles.Role.SYSTEM)
    assert trust.show("s1", domain="SYS").role == "system"


def test_an_identity_is_issued_once_until_it_is_revoked(trust):
    trust.issue("a1", AGENT)
    first = trust.show("a1")
    with pytest.raises(errors.AlreadyExists):
        trust.issue("a1", AGENT)
    assert trust.revoke("a1").status == "revoked"
    assert trust.revoke("a1").status == "revoked"  # once more is no error
    with pytest.raises(errors.Refused):
        trust.renew("a1")
    with pytest.raises(errors.NotFound):
        trust.credentials("a1")
    trust.issue("a1", roles.Role.MANAGER)
    second = trust.show("a1")
    assert (second.status, second.role) == ("valid", "manager")
    assert second.public_key != first.public_key


def test_renewal_keeps_key_role_and_topics(trust):
    now = time.time()
    past = keyring.Keyring(trust.folder, "north", clock=lambda: now - 1000)
    past.issue("u1", roles.Role.USER, topics=("topic.orders.>", "topic.Bills.*"), lifetime_s=500)
    before = trust.show("u1")
    assert before.status == "expired"
    trust.renew("u1", lifetime_s=500)
    after = trust.show("u1")
    assert (after.status, after.public_key, after.role) == ("valid", before.public_key, "user")
    assert (after.publish, after.subscribe) == (before.publish, before.subscribe)
    assert "topic.Bills.*" in after.publish
    assert trust.credentials("u1").claims.exp == after.expires_at


def test_a_document_without_topics_or_queues_is_not_one_for_all(trust):
    for nothing in ({"topics": ()}, {"queue_grants": ()}):
        with pytest.raises(errors.InvalidInput, match="at least one"):
            trust.issue("shop", roles.Role.USER, **nothing)
    assert trust.records() == []


def test_renewal_never_leaves_an_older_document_that_outlives_the_record(trust):
    """Otherwise its revocation would be forgotten while it was still accepted."""
    trust.issue("a1", AGENT)  # never expires
    with pytest.raises(errors.Refused, match="earlier"):
        trust.renew("a1", lifetime_s=60)
    trust.issue("a2", AGENT, lifetime_s=1000)
    with pytest.raises(errors.Refused, match="earlier"):
        trust.renew("a2", lifetime_s=60)
    before = trust.show("a2")
    behind = keyring.Keyring(trust.folder, "north", clock=lambda: before.issued_at - 500)
    behind.renew("a2", lifetime_s=2000)
    assert behind.show("a2").issued_at >= before.issued_at
    trust.renew("a2")
    assert trust.show("a2").expires_at is None


@pytest.mark.parametrize("lifetime_s", [-1, float("inf"), float("nan"), 1e30])
def test_a_lifetime_has_bounds(trust, lifetime_s):
    with pytest.raises(errors.InvalidInput):
        trust.issue("a1", AGENT, lifetime_s=lifetime_s)


async def test_a_document_that_a_broker_would_not_read_is_not_made(trust, tmp_path):
    topics = tuple(f"topic.{number:08}.>" for number in range(200))
    with pytest.raises(errors.LimitExceeded):
        trust.issue("u1", roles.Role.USER, topics=topics)
    trust.issue("u1", roles.Role.USER, topics=topics[:26])
    assert len(trust.credentials("u1").user_jwt) > 3300
    trust.issue("g1", roles.Role.GATEWAY, topics=topics, bearer=True)  # MQTT has no such line
    async with servers.server(tmp_path, trust) as server:
        assert await servers.knock(server, trust.credentials("u1")) == ""


def test_a_domain_half_made_is_made_again(trust):
    (trust.folder / "accounts" / "south").mkdir()
    assert trust.domains() == ["north"]
    trust.add_domain("south")
    assert trust.domains() == ["north", "south"]
    with pytest.raises(errors.AlreadyExists):
        trust.add_domain("south")


def test_passwords_live_with_their_domain(trust):
    trust.passwords().set("ann", roles.Role.VIEWER, "correct horse")
    assert trust.passwords().check("ann", "correct horse").role is roles.Role.VIEWER
    assert trust.show("ann").role == roles.Role.VIEWER


def test_a_key_made_elsewhere_stays_there(trust):
    key = nkeys.KeyPair.create(nkeys.KeyKind.USER)
    document = trust.issue("a1", AGENT, public_key=key.public)
    assert credentials.Credentials(document, key.seed).identity == "a1"
    with pytest.raises(errors.NotFound):
        trust.credentials("a1")
    trust.revoke("a1")
    with pytest.raises(errors.Refused, match="new key"):
        trust.issue("a1", AGENT, public_key=key.public)
    with pytest.raises(errors.InvalidInput, match="user"):
        trust.issue("a2", AGENT, public_key=nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT).public)


def test_a_revoked_key_is_not_issued_again(trust):
    key = nkeys.KeyPair.create(nkeys.KeyKind.USER)
    trust.issue("a1", AGENT, public_key=key.public)
    trust.revoke("a1")
    trust.issue("a1", AGENT)
    trust.revoke("a1")
    for name in ("a1", "a2"):
        with pytest.raises(errors.Refused, match="needs a new key"):
            trust.issue(name, AGENT, public_key=key.public)


def test_a_key_belongs_to_one_identity(trust):
    key = nkeys.KeyPair.create(nkeys.KeyKind.USER)
    trust.issue("a1", AGENT, public_key=key.public)
    with pytest.raises(errors.Refused, match="was issued to 'a1'"):
        trust.issue("a2", AGENT, public_key=key.public)
    assert [record.identity for record in trust.records()] == ["a1"]


def test_what_was_signed_after_a_revocation_of_its_key_can_be_revoked(trust):
    now = time.time()
    later = keyring.Keyring(trust.folder, "north", clock=lambda: now + 5)
    trust.issue("a1", AGENT)
    trust.revoke("a1")
    public_key = trust.show("a1").public_key
    document = later.sign_user("north", "a1", AGENT, public_key, now + 5)
    later.store_user("north", "a1", public_key, document, None)
    assert (later.show("a1").status, later.check(document).name) == ("valid", "a1")
    assert later.revoke("a1").status == "revoked"
    with pytest.raises(errors.Unauthorized):
        later.check(document)


def test_revocations_go_a_day_after_what_they_revoke_has_expired(trust):
    """Not at once: the clock may be ahead and be set back."""
    now = time.time()
    past = keyring.Keyring(trust.folder, "north", clock=lambda: now - 1000 - keyring.CLOCK_STEP_S)
    for name, life in (("short", 10), ("long", 5000), ("forever", None)):
        past.issue(name, AGENT, lifetime_s=life)
        past.revoke(name)
    trust.issue("other", AGENT)
    trust.revoke("other")
    account = jwt.read(trust.claims_update()[1].decode()).nats
    assert isinstance(account, jwt.AccountClaims)
    assert set(account.revocations) == {trust.show(name).public_key for name in ("long", "forever", "other")}


async def test_a_full_list_of_revocations_fits_into_brokers_and_stops_nothing_else(trust, tmp_path):
    for name in ("stolen", "late"):
        trust.issue(name, AGENT)
    trust.issue("system", roles.Role.SYSTEM)
    path = trust.folder / "accounts" / "north" / "revoked.json"
    entry = credential_records.CredentialRevocation("machine-123456", int(time.time()), 0)
    keys = (nkeys.KeyPair.create(nkeys.KeyKind.USER).public for _ in range(keyring.REVOCATIONS_MAX - 1))
    path.write_bytes(msgspec.json.encode(dict.fromkeys(keys, entry)))
    stolen = trust.credentials("stolen")
    async with servers.server(tmp_path, trust) as broker, servers.connected(broker, stolen) as (bus, _):
        trust.revoke("stolen")
        await identities.publish_accounts(trust, [broker.url])
        await eventually(lambda: not bus.is_connected)
        assert "Authorization" in await servers.knock(broker, stolen)
        with pytest.raises(errors.LimitExceeded, match="'late' cannot be revoked now"):
            trust.revoke("late")
        trust.issue("new", AGENT)
        assert (trust.show("late").status, trust.show("stolen").status) == ("valid", "revoked")
        assert await servers.knock(broker, trust.credentials("new")) == ""
    async with servers.server(tmp_path, trust) as broker:
        assert "Authorization" in await servers.knock(broker, stolen)


def test_the_reason_of_a_refusal(trust, tmp_path):
    now = time.time()
    past = keyring.Keyring(trust.folder, "north", clock=lambda: now - 1000)
    good, old, gone = (
        trust.issue("good", AGENT),
        past.issue("old", AGENT, lifetime_s=10),
        trust.issue("gone", AGENT),
    )
    trust.revoke("gone")
    assert trust.check(good).name == "good"
    strange = keyring.Keyring.create(tmp_path / "strange", "north").issue("good", AGENT)
    for document, reason in ((old, "expired"), (gone, "revoked"), (strange, "not of this operator")):
        with pytest.raises(errors.Unauthorized, match=reason):
            trust.check(document)


@pytest.mark.parametrize(
    "lost",
    [
        "operator.jwt",
        "keys/signing.seed",
        "accounts/north/signing.seed",
        "accounts/north/account.jwt",
        "accounts/north/roles/user.seed",  # a new one in its place would void what the old one signed
    ],
)
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_lost_key_is_named(trust, lost, how):
    path = trust.folder / lost
    if how == "missing":
        path.unlink()
    else:
        path.write_text("rubbish")

    def use() -> None:
        again = keyring.Keyring.open(trust.folder)
        again.issue("u1", roles.Role.USER, topics=("topic.x",))
        again.issue("u2", roles.Role.USER)
        again.revoke("u1")

    with pytest.raises((errors.NotFound, errors.InvalidInput), match=path.name) as caught:
        use()
    assert caught.value.hint


def test_the_two_root_keys_can_be_taken_off_the_machine(trust):
    (trust.folder / "keys" / "operator.seed").unlink()
    (trust.folder / "accounts" / "north" / "account.seed").unlink()
    trust.issue("a1", AGENT)
    trust.revoke("a1")
    trust.add_domain("south")
    assert len(trust.broker().accounts) == 3


def test_a_new_table_of_roles_reaches_old_credentials(trust, monkeypatch):
    before = trust.broker()
    assert trust.broker() == before  # nothing changed, so nothing is signed anew
    monkeypatch.setitem(roles.DUTIES, roles.Role.NOTIFIER, roles.RolePermissions("", streams=("receipts",)))
    after = trust.broker()
    (north,) = set(after.accounts) - {after.system_account}
    assert after.accounts[north] != before.accounts[north]
    assert jwt.read(after.accounts[north]).iat > jwt.read(before.accounts[north]).iat


# -- the credentials file


def test_credentials_survive_writing_and_reading(trust):
    trust.issue("a1", AGENT)
    actual = trust.credentials("a1")
    assert credentials.Credentials.parse(actual.render()) == actual
    assert actual.seed not in repr(actual)


def test_expired_credentials_say_so_themselves(trust):
    trust.issue("a1", AGENT, lifetime_s=60)
    actual = trust.credentials("a1")
    actual.check(time.time())
    with pytest.raises(errors.Unauthorized, match="expired"):
        actual.check(time.time() + 61)


def test_credentials_of_two_identities_do_not_mix(trust):
    trust.issue("a1", AGENT)
    trust.issue("a2", AGENT)
    mixed = credentials.Credentials(trust.credentials("a1").user_jwt, trust.credentials("a2").seed)
    with pytest.raises(errors.InvalidInput, match="does not belong"):
        credentials.Credentials.parse(mixed.render())


CREDS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "-----BEGIN NATS USER JWT-----\n",
                "------END NATS USER JWT------\n",
                "-----BEGIN USER NKEY SEED-----\n",
                "------END USER NKEY SEED------\n",
                "a.b.c\n",
                "SUAK77U4UHHBAZTXQ6RJEAZ3EXQRDGPJTGATVFCTN3SD3EG56HUXHAWNZE\n",
            ]
        ),
        st.text(max_size=20),
    ),
    max_size=8,
).map("".join)


@given(CREDS)
def test_hostile_credentials_give_only_our_error(text):
    with pytest.raises(errors.MusterError):
        credentials.Credentials.parse(text)


# -- with a broker


async def test_wrong_expired_and_revoked_credentials_are_refused(trust, tmp_path):
    now = time.time()
    past = keyring.Keyring(trust.folder, "north", clock=lambda: now - 1000)
    for name in ("a1", "a2", "gone"):
        trust.issue(name, AGENT)
    past.issue("old", AGENT, lifetime_s=10)
    gone = trust.credentials("gone")
    trust.revoke("gone")
    strange = keyring.Keyring.create(tmp_path / "strange", "north")
    strange.issue("a1", AGENT)
    a1, a2 = trust.credentials("a1"), trust.credentials("a2")
    async with servers.server(tmp_path, trust) as server:
        assert await servers.knock(server, a1) == ""
        for wrong in (
            credentials.Credentials(a1.user_jwt, a2.seed),  # the document of another user
            strange.credentials("a1"),  # the right name, from another operator
            trust.credentials("old"),
            gone,
        ):
            assert "Authorization Violation" in await servers.knock(server, wrong)


async def test_a_roles_key_cannot_make_another_role(trust, tmp_path):
    """A stolen key of the enrolment can only create agents."""
    trust.issue("a1", AGENT)
    path = trust.folder / "accounts" / "north" / "roles" / "agent.seed"
    stolen = nkeys.KeyPair.from_seed(path.read_text())
    thief = nkeys.KeyPair.create(nkeys.KeyKind.USER)
    account = trust.credentials("a1").claims.nats
    assert isinstance(account, jwt.UserClaims)
    everything = jwt.UserClaims(
        issuer_account=account.issuer_account,
        pub=jwt.SubjectPermissions(allow=(">",)),
        sub=jwt.SubjectPermissions(allow=(">",)),
        subs=-1,
        data=-1,
        payload=-1,
    )
    plain = jwt.UserClaims(issuer_account=account.issuer_account)
    async with servers.server(tmp_path, trust) as server:
        forged = jwt.issue(stolen, thief.public, "a1", everything, issued_at=int(time.time()))
        assert "Authorization" in await servers.knock(server, credentials.Credentials(forged, thief.seed))
        agent = jwt.issue(stolen, thief.public, "a7", plain, issued_at=int(time.time()))
        async with servers.line(server, credentials.Credentials(agent, thief.seed)) as (line, answer):
            assert not answer
            assert "Permissions Violation" in await line.publish("muster.manage.to.a1.command")


async def test_a_revocation_reaches_a_running_broker(trust, tmp_path):
    trust.issue("a1", AGENT)
    trust.issue("a2", AGENT)
    trust.issue("s1", roles.Role.SYSTEM)
    first = trust.credentials("a1")
    async with (
        servers.server(tmp_path, trust) as server,
        servers.line(server, first) as (line, answer),
        servers.line(server, trust.credentials("a2")) as (other, _),
        servers.connected(server, trust.credentials("s1", domain="SYS")) as (system, _),
    ):
        assert not answer
        trust.revoke("a1")
        subject, payload = trust.claims_update()
        assert b'"code":200' in (await system.request(subject, payload, timeout=5)).data
        assert "user authentication revoked" in (await line.hear()).lower()
        assert "Authorization Violation" in await servers.knock(server, first)
        assert await other.say("PING") == ""  # other clients are not affected
        trust.issue("a1", AGENT)
        assert await servers.knock(server, trust.credentials("a1")) == ""


async def test_a_live_connection_ends_when_its_credentials_do(trust, tmp_path):
    async with servers.server(tmp_path, trust) as server:
        trust.issue("a1", AGENT, lifetime_s=3)
        async with servers.line(server, trust.credentials("a1")) as (line, answer):
            assert not answer
            assert "expired" in (await line.hear()).lower()


async def test_a_domain_is_added_to_a_running_broker(trust, tmp_path):
    trust.issue("s1", roles.Role.SYSTEM)
    async with (
        servers.server(tmp_path, trust) as server,
        servers.connected(server, trust.credentials("s1", domain="SYS")) as (system, _),
    ):
        trust.add_domain("south")
        trust.issue("a1", AGENT, domain="south")
        there = trust.credentials("a1", domain="south")
        assert "Authorization" in await servers.knock(server, there)
        subject, payload = trust.claims_update(domain="south")
        await system.request(subject, payload, timeout=5)
        assert await servers.knock(server, there) == ""


def test_the_file_is_what_other_nats_clients_read(trust):
    """Line by line, the way nats-py looks for its two secrets (with the package nkeys it would connect)."""
    trust.issue("a1", AGENT)
    path: pathlib.Path = trust.credentials_path("a1")
    lines = path.read_text().splitlines()
    actual = trust.credentials("a1")
    assert lines[lines.index("-----BEGIN NATS USER JWT-----") + 1] == actual.user_jwt
    assert lines[lines.index("-----BEGIN USER NKEY SEED-----") + 1] == actual.seed


def followed(trust: keyring.Keyring, folder: pathlib.Path, after: int = -1) -> tuple[keyring.Keyring, int]:
    """The keys of another machine that has asked until nothing is missing."""
    while True:
        documents = machine_keys.MachineKeys(trust).documents(after)
        copy = machine_keys.adopt(folder, "north", documents)
        if documents.after == after:
            return copy, after
        after = documents.after


def test_other_machines_learn_of_all_documents_whatever_the_clock_says(trust, tmp_path, monkeypatch):
    now_ns = time.time_ns()
    write = private_files.replace_file
    offsets = {"a1": 0, "a2": 0, "a3": -3600 * 10**9}  # one tick of the clock; then it is set back

    def replace(path: pathlib.Path, data: bytes, **options: int) -> None:
        write(path, data, **options)
        if path.parent.name == "users":
            os.utime(path, ns=(now_ns, now_ns + offsets[path.stem]))

    monkeypatch.setattr(private_files, "replace_file", replace)
    after = -1
    for name in offsets:
        trust.issue(name, AGENT, public_key=nkeys.KeyPair.create(nkeys.KeyKind.USER).public)
        with monkeypatch.context() as patch:
            patch.setattr(private_files, "replace_file", write)
            copy, after = followed(trust, tmp_path / "copy", after)
        assert copy.show(name).status == "valid"


def test_documents_for_other_machines_fit_into_a_message_with_all_revocations(trust, tmp_path):
    keys = [nkeys.KeyPair.create(nkeys.KeyKind.USER).public for _ in range(100)]
    made = itertools.islice(itertools.cycle(keys), keyring.REVOCATIONS_MAX - 10)
    revoked = {
        f"{key[:-4]}{number:04}": credential_records.CredentialRevocation(f"agent-{number}", 2**31, 2**32)
        for number, key in enumerate(made)
    }
    (trust.folder / "accounts/north/revoked.json").write_bytes(msgspec.json.encode(revoked))
    trust.issue("a1", AGENT)
    trust.revoke("a1")
    after, size = -1, 0
    while (documents := machine_keys.MachineKeys(trust).documents(after)).after != after:
        size = max(size, len(msgspec.json.encode(documents)))
        after = documents.after
    assert size < bus_settings.BusSettings().max_payload_bytes - (32 << 10)
    assert len(msgspec.json.encode(documents)) < 4096  # every second, if nothing is new
    copy, _ = followed(trust, tmp_path / "copy")
    assert copy.show("a1").status == "revoked"


def test_an_identity_of_several_machines_is_that_of_those_left(trust):
    """It has a key on each machine: its record must not be that of a machine which was removed."""
    machines = machine_keys.MachineKeys(trust)
    keys = {machine: nkeys.KeyPair.create(nkeys.KeyKind.USER).public for machine in ("east", "west")}
    for machine, key in keys.items():
        machines.issue(machine, {"message": roles.Role.GATEWAY}, {"message": key}, shared=("message",))
    machines.revoke("east")
    assert machines.of("east") == {}
    assert trust.show("message").status == "valid"
    assert trust.show("message").public_key == keys["west"]
    assert trust.revoke("message").status == "revoked"
    assert set(trust.revocations("north")) == set(keys.values())


def test_a_login_at_a_gateway_is_revoked_with_its_identity_also_for_a_former_key(trust):
    machines = machine_keys.MachineKeys(trust)
    keys = [nkeys.KeyPair.create(nkeys.KeyKind.USER).public for _ in range(3)]
    documents = [machines.issue_login("gate", "ann", roles.Role.USER, key) for key in (*keys[:2], keys[1])]
    assert set(trust.revocations("north")) == {keys[0]}, "it has another one now"
    trust.check(documents[1])
    trust.revoke("ann")
    assert set(keys[:2]) <= set(trust.revocations("north"))
    for document in documents:
        with pytest.raises(errors.Unauthorized):
            trust.check(document)
    with pytest.raises(errors.Unauthorized, match="revoked"):
        machines.issue_login("gate", "ann", roles.Role.USER, keys[2])
