"""Enrolment tokens: one machine each, with repeated requests and crashes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from muster.app import enrolment
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client, management
from muster.app.machines import admission
from muster.bus.rpc import client as rpc_client
from muster.bus.rpc import server
from muster.core import errors, subjects
from muster.core.settings import domain
from muster.manage import protocol, rows, settings
from muster.trust import credentials, jwt, keyring, nkeys
from muster.trust.permissions import roles

pytestmark = pytest.mark.may_block(reason="keys are written by this thread; the service uses another")


def new_key() -> str:
    return nkeys.KeyPair.create(nkeys.KeyKind.USER).public


DAY_S = 86_400.0


class Records:
    """Those of a registry, in memory."""

    def __init__(self) -> None:
        self.rows: dict[str, rows.EnrolmentRow] = {}
        self.forgotten_agents: set[str] = set()

    async def forgotten(self) -> list[rows.ForgottenAgent]:
        return [rows.ForgottenAgent(name=name) for name in self.forgotten_agents]

    async def undrain(self, name: str, kind: str) -> rows.DrainResult:
        self.forgotten_agents.remove(name)
        return rows.DrainResult(count=0)

    async def enrolments(self) -> list[rows.EnrolmentRow]:
        return [self.rows[token] for token in sorted(self.rows)]

    async def enrolment(self, token: str) -> rows.EnrolmentRow | None:
        return self.rows.get(token)

    async def set_enrolment(
        self, token: str, enrolment: rows.Enrolment, *, version: int
    ) -> rows.EnrolmentRow:
        known = self.rows.get(token)
        if (known.version if known else 0) != version:
            raise errors.Conflict("this token is being used concurrently")
        self.rows[token] = rows.EnrolmentRow(token=token, enrolment=enrolment, version=version + 1)
        return self.rows[token]


class Office:
    def __init__(self, folder: Path) -> None:
        self.later_s = 0.0
        self.records = Records()
        self.trust = keyring.Keyring.create(folder, "work", clock=lambda: time.time() + self.later_s)
        settings = app_settings.Settings(domain=domain.DomainSettings(name="work", data_dir=str(folder)))
        self.service = enrolment.EnrolmentService(
            self.records, self.trust, admission.MachineAdmission(settings, self.trust), lifetime_s=4 * DAY_S
        )

    async def token(self, name: str = "host-b", *, approval: bool = False, lifetime_s: float = 60.0) -> str:
        """The identity of a new token."""
        text = await self.service.make(
            "ann", name, ("nats://x",), "", approval=approval, lifetime_s=lifetime_s
        )
        return credentials.Credentials.parse(enrolment.EnrolmentToken.parse(text).creds).identity


@pytest.fixture
def office(tmp_path):
    return Office(tmp_path / "keys")


async def test_a_request_that_is_repeated_gets_the_same_answer(office):
    token, key = await office.token(), new_key()
    first = await office.service.enrol(token, key, "m")
    assert not first.replaced
    assert await office.service.enrol(token, key, "m") == first
    with pytest.raises(errors.Forbidden, match="is spent"):
        await office.service.enrol(token, new_key(), "m")


async def test_a_token_of_a_machine_admits_the_key_of_its_request_only(office, monkeypatch):
    """Else a machine that was removed could return with other keys and its spent token."""
    monkeypatch.setattr(office.service._admission, "machines", lambda: None)
    text = await office.service.make(
        "ann", "b", ("nats://x",), "", approval=False, lifetime_s=60.0, machine_roles=("agent",)
    )
    token = credentials.Credentials.parse(enrolment.EnrolmentToken.parse(text).creds).identity
    asked = admission.JoinRequest(
        name="b", address="10.0.0.2", zone="b", keys={"bootstrap": new_key()}, box=""
    )
    with pytest.raises(errors.Forbidden, match="do not include that of its request"):
        await office.service.enrol(token, new_key(), "m", join=asked)


async def test_the_service_may_end_at_any_moment(office, monkeypatch):
    """After the token is spent, after the key is issued: the same key is admitted, and no other."""
    for when in ("before", "after"):
        token, key = await office.token(f"host-{when}"), new_key()
        issue = office.trust.issue

        def crash(*arguments: Any, when: str = when, issue: Any = issue, **options: Any) -> str:
            if when == "after":
                issue(*arguments, **options)
            raise RuntimeError("power cut")

        monkeypatch.setattr(office.trust, "issue", crash)
        with pytest.raises(RuntimeError):
            await office.service.enrol(token, key, "m")
        monkeypatch.setattr(office.trust, "issue", issue)
        with pytest.raises(errors.Forbidden, match="is spent"):
            await office.service.enrol(token, new_key(), "m")
        assert (await office.service.enrol(token, key, "m")).name == f"host-{when}"


async def test_brokers_learn_of_a_replaced_key_although_the_admission_was_not_recorded(office, monkeypatch):
    await office.service.enrol(await office.token(), new_key(), "m")
    token, key = await office.token(), new_key()
    put = office.records.set_enrolment

    async def fail(token: str, record: rows.Enrolment, *, version: int) -> rows.EnrolmentRow:
        if record.admitted:
            raise errors.Unavailable("the registry does not reply")
        stored: rows.EnrolmentRow = await put(token, record, version=version)
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(office.records, "set_enrolment", fail)
        with pytest.raises(errors.Unavailable):
            await office.service.enrol(token, key, "m")
    assert (await office.service.enrol(token, key, "m")).replaced


async def test_a_forgotten_machine_returns_to_service_before_it_has_new_credentials(office, monkeypatch):
    """Whatever ends in between: the credentials of forgotten agents are revoked."""
    await office.service.enrol(await office.token(), new_key(), "m")
    office.records.forgotten_agents = {"host-a", "host-b"}

    def fail(*_: object, **__: object) -> str:
        raise errors.Unavailable("the domain ends")

    token, key = await office.token(), new_key()
    with monkeypatch.context() as patch:
        patch.setattr(office.trust, "revoke", fail)
        with pytest.raises(errors.Unavailable):
            await office.service.enrol(token, key, "m")
    assert office.records.forgotten_agents == {"host-a"}
    assert (await office.service.enrol(token, key, "m")).replaced


async def test_many_machines_join_at_once(office):
    tokens = [await office.token(f"host-{number}") for number in range(8)]
    admitted = await asyncio.gather(*(office.service.enrol(token, new_key(), "m") for token in tokens))
    assert sorted(entry.name for entry in admitted) == [f"host-{number}" for number in range(8)]


async def test_a_machine_that_was_replaced_does_not_come_back_with_its_old_token(office):
    old, old_key = await office.token(), new_key()
    await office.service.enrol(old, old_key, "m")
    new, key = await office.token(), new_key()
    assert (await office.service.enrol(new, key, "m")).replaced
    with pytest.raises(errors.Forbidden, match="is spent"):
        await office.service.enrol(old, old_key, "m")
    assert office.trust.show("host-b").public_key == key
    assert office.trust.show("host-b").status == "valid"
    office.trust.revoke("host-b")
    with pytest.raises(errors.Forbidden, match="is spent"):
        await office.service.enrol(new, key, "m")


async def test_a_machine_renews_its_document_for_as_long_as_its_key_is_the_current_one(office):
    token, key = await office.token(), new_key()
    first = await office.service.enrol(token, key, "m", "host-b")
    assert office.trust.check(first.jwt).exp == office.trust.show("host-b").expires_at
    assert jwt.read(first.joining).exp - time.time() > 399 * DAY_S
    assert (await office.service.enrol(token, key, "m", "host-b")).jwt == first.jwt  # not due yet
    del office.records.rows[token]  # as some time after its expiry
    office.later_s = 30 * DAY_S  # it was switched off
    with pytest.raises(errors.Unauthorized, match="expired"):
        office.trust.check(first.jwt)
    renewed = await office.service.enrol(token, key, "m", "host-b")
    assert office.trust.check(renewed.jwt).sub == key
    with pytest.raises(errors.Forbidden):  # the document of another key
        await office.service.enrol(token, new_key(), "m", "host-b")
    office.trust.issue("carol", roles.Role.USER, public_key=(carol := new_key()))
    with pytest.raises(errors.Forbidden):  # not a machine's
        await office.service.enrol(token, carol, "m", "carol")
    office.trust.revoke("host-b")
    with pytest.raises(errors.Forbidden):
        await office.service.enrol(token, key, "m", "host-b")


async def test_the_list_of_revocations_is_bounded_however_many_machines_are_replaced(office, monkeypatch):
    monkeypatch.setattr(keyring, "REVOCATIONS_MAX", 20)
    monkeypatch.setattr(enrolment, "RESERVED", 5)
    for _ in range(60):  # some a day; the lifetime is four, and a day is added
        await office.service.enrol(await office.token(), new_key(), "m", "host-b")
        office.later_s += 0.4 * DAY_S
    token, key = await office.token(), new_key()
    for _ in range(15):
        with contextlib.suppress(errors.LimitExceeded):
            await office.service.enrol(await office.token(), new_key(), "m", "host-b")
    with pytest.raises(errors.LimitExceeded, match="cannot be revoked now"):
        await office.service.enrol(token, key, "m", "host-b")
    for number in range(5):  # an operator still can
        office.trust.issue(f"stolen-{number}", roles.Role.USER)
        assert office.trust.revoke(f"stolen-{number}").status == "revoked"
    office.later_s += 6 * DAY_S
    assert (await office.service.enrol(token, key, "m", "host-b")).replaced, "the token is still its own"


async def test_identities_of_tokens_are_deleted_after_they_have_expired(office):
    tokens = [await office.token(f"host-{number}") for number in range(2)]
    await office.service.enrol(tokens[0], new_key(), "m", "host-0")
    office.later_s = rows.ENROLMENT_KEPT_S + 60 + DAY_S + 1
    office.trust.discard_expired(enrolment.PREFIX, roles.Role.JOINING)
    assert {record.identity for record in office.trust.records()} == {tokens[0], "host-0"}


async def test_machines_that_wait_are_listed_in_pages(office, bus, monkeypatch):
    monkeypatch.setattr(server, "PAGE_ROWS", 2)
    tokens = [await office.token(f"host-{number}", approval=True) for number in range(5)]
    for token in tokens:
        with pytest.raises(errors.Unavailable, match="approval"):
            await office.service.enrol(token, new_key(), "m")
    part = management.ManagementComponent(settings.ManageSettings())
    part._enrolment = office.service
    listed = server.RpcOperation.plain("domain.waiting", part._waiting, audited=False)
    async with server.RpcServer(bus, protocol.PART, [listed]):
        subject = subjects.from_identity(protocol.PART, bus.identity, "domain", "waiting")
        first = await rpc_client.call(bus, subject)
        assert (len(first["items"]), first["next"]) == (2, sorted(tokens)[1])
        waiting = await bootstrap_client.BootstrapClient(bus).waiting()
        assert [row.token for row in waiting] == sorted(tokens)


async def test_what_is_approved_is_the_machine_that_asked(office):
    token, key = await office.token(approval=True), new_key()
    assert await office.service.waiting() == []
    with pytest.raises(errors.Unavailable, match="approval"):
        await office.service.enrol(token, key, "machine-1")
    waiting = enrolment.WaitingMachine(token=token, name="host-b", machine="machine-1")
    assert await office.service.waiting() == [waiting]
    with pytest.raises(errors.Forbidden, match="another machine"):
        await office.service.enrol(token, new_key(), "machine-2")
    assert await office.service.approve("host-b") == enrolment.ApprovedMachine(approved="host-b")
    with pytest.raises(errors.Forbidden):
        await office.service.enrol(token, new_key(), "machine-2")
    assert (await office.service.enrol(token, key, "machine-1")).name == "host-b"
    with pytest.raises(errors.NotFound):
        await office.service.approve("host-b")


async def test_the_operator_chooses_between_two_requests_with_the_same_name(office):
    tokens, keys = [await office.token(approval=True) for _ in range(3)], [new_key(), new_key()]
    for token, key in zip(tokens, keys, strict=False):
        with pytest.raises(errors.Unavailable):
            await office.service.enrol(token, key, "m")
    with pytest.raises(errors.Conflict) as raised:
        await office.service.approve("host-b")
    assert tokens[1] in (raised.value.hint or "")
    await office.service.approve(tokens[1])
    assert (await office.service.enrol(tokens[1], keys[1], "m")).name == "host-b"
    with pytest.raises(errors.Unavailable):
        await office.service.enrol(tokens[0], keys[0], "m")


async def test_a_rejected_token_has_a_reason(office, monkeypatch):
    token, key = await office.token(lifetime_s=60.0), new_key()
    assert office.trust.show(token).role == roles.Role.JOINING
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61.0)
    with pytest.raises(errors.Forbidden, match="has expired"):
        await office.service.enrol(token, key, "m")
    with pytest.raises(errors.Forbidden, match="unknown token"):
        await office.service.enrol("join-0", key, "m")


async def test_a_token_needs_addresses_that_a_machine_can_use(office):
    for address in ("foo", "tls://", "tls://a:b"):
        with pytest.raises(errors.InvalidInput, match="address: "):
            await office.service.make("ann", "b", (address,), "", approval=False, lifetime_s=60.0)
    assert await office.records.enrolments() == []


async def test_a_name_of_another_role_is_not_given_away(office):
    token = await office.token("boss")
    office.trust.issue("boss", roles.Role.OPERATOR)
    with pytest.raises(errors.Conflict, match="role operator"):
        await office.service.enrol(token, new_key(), "m")
    assert office.trust.show("boss").status == "valid"


def test_the_key_of_a_machine_lasts_until_it_has_credentials(tmp_path):
    key = enrolment.machine_key(tmp_path)
    assert enrolment.machine_key(tmp_path).public == key.public
    assert (tmp_path / "joining.seed").stat().st_mode & 0o777 == 0o600
    trust = keyring.Keyring.create(tmp_path / "keys", "work")
    document = trust.issue("host-b", roles.Role.AGENT, public_key=key.public)
    enrolment.write_credentials(tmp_path, key, document)
    assert credentials.Credentials.load(tmp_path / "agent.creds").identity == "host-b"
    assert enrolment.machine_key(tmp_path).public != key.public


def test_what_joins_may_ask_to_be_admitted_and_nothing_else():
    limits = roles.limits(roles.Role.JOINING, "join-1")
    assert limits.pub.allow == ("muster.manage.from.join-1.domain.enrol",)
    assert limits.sub.allow == ("_R.*.join-1.>", "_INBOX.join-1.>")


@pytest.mark.parametrize("name", ["sensor", "channel", "web"])
async def test_no_machine_gets_the_name_of_a_part_of_the_domain(office, name):
    """A machine called sensor would revoke the domain's own sensor and report in its place."""
    office.trust.issue("sensor", roles.Role.AGENT)
    with pytest.raises(errors.Conflict, match=f"'{name}' is the name of a part of the domain itself"):
        await office.token(name)


async def test_no_machine_replaces_an_agent_of_the_domains_own_machines(office):
    """They have credentials that the domain issued: `local`, and the names of further machines."""
    token = await office.token("b")
    office.trust.issue("b", roles.Role.AGENT)
    for attempt in (office.token("b"), office.service.enrol(token, new_key(), "m")):
        with pytest.raises(errors.Conflict, match="'b' has credentials that this domain issued"):
            await attempt
    assert office.trust.show("b").status == "valid"


async def test_a_machine_takes_the_name_of_an_agent_that_was_revoked(office):
    office.trust.issue("b", roles.Role.AGENT)
    office.trust.revoke("b")
    for _ in range(2):  # the second time as a reinstalled machine: the old credentials file is still there
        key = new_key()
        await office.service.enrol(await office.token("b"), key, "m")
        assert office.trust.show("b").public_key == key
