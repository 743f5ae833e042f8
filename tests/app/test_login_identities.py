"""Logins refer to an identity and can only narrow it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from muster.app import identities
from muster.bus import api
from muster.bus.client import client
from muster.bus.rpc import client as rpc_client
from muster.core import errors
from muster.testing.eventually import eventually
from muster.trust import identity_roles, jwt, keyring
from muster.trust.login import passwords
from muster.trust.permissions import roles
from tests.trust import servers

VIEWER, USER, OPERATOR, AGENT = roles.Role.VIEWER, roles.Role.USER, roles.Role.OPERATOR, roles.Role.AGENT
PASSWORD = "a long secret"


@pytest.fixture
def trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> keyring.Keyring:
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 4)
    return keyring.Keyring.create(tmp_path / "keys", "lab")


@pytest.mark.parametrize(
    ("identity", "login", "effective"),
    [
        (VIEWER, VIEWER, VIEWER),
        (VIEWER, USER, VIEWER),
        (VIEWER, OPERATOR, VIEWER),
        (USER, VIEWER, VIEWER),
        (USER, OPERATOR, USER),
        (OPERATOR, VIEWER, VIEWER),
        (OPERATOR, USER, None),  # services decide by the role of the identity
        (AGENT, AGENT, AGENT),
        (AGENT, USER, None),
        (AGENT, VIEWER, None),
        (roles.Role.WEB, OPERATOR, None),
    ],
)
def test_the_role_of_a_login_is_never_wider_than_that_of_its_identity(trust, identity, login, effective):
    trust.issue("ann", identity)
    if effective is not login:
        with pytest.raises(errors.Conflict, match=r"ann|role"):
            trust.passwords().set("ann", login, PASSWORD)
        if effective is None:
            with pytest.raises(errors.Conflict):
                identities.login_credentials(trust, "ann", login)
            return
    else:
        trust.passwords().set("ann", login, PASSWORD)
        assert trust.passwords().verify("ann", PASSWORD).role is login
    creds = identities.login_credentials(trust, "ann", login)
    assert (creds.identity, creds.claims.sub) == ("ann", trust.show("ann").public_key)
    assert isinstance(creds.claims.nats, jwt.UserClaims)
    assert roles.role_from_tags(creds.claims.nats.tags) is effective
    assert [record.identity for record in trust.records()] == ["ann"]


def test_a_login_follows_its_identity_and_an_identity_made_for_it_follows_the_login(trust):
    known = trust.passwords()
    known.set("ann", VIEWER, PASSWORD)
    known.set("ann", OPERATOR, PASSWORD, administers=True)  # its key was never handed out
    assert (trust.show("ann").role, known.verify("ann", PASSWORD).administers) == (OPERATOR, True)
    trust.revoke("ann")
    with pytest.raises(errors.Unauthorized, match="revoked"):
        known.verify("ann", PASSWORD)
    with pytest.raises(errors.Unauthorized, match="revoked"):
        known.current("ann")
    with pytest.raises(errors.Unauthorized, match="revoked"):
        identities.login_credentials(trust, "ann", OPERATOR)
    trust.issue("ann", VIEWER)  # now it is somebody's
    record = known.verify("ann", PASSWORD)
    assert (record.role, record.administers) == (VIEWER, False)
    with pytest.raises(errors.Conflict, match="wider role"):
        known.set("ann", OPERATOR, PASSWORD)


def test_a_login_of_a_version_before_gets_an_identity_when_it_is_used(trust):
    passwords.PasswordStore(trust.folder / "accounts/lab/passwords").set("ann", USER, PASSWORD)
    assert trust.passwords().verify("ann", PASSWORD).role is USER
    assert trust.show("ann").role == USER


def test_an_expired_identity_has_no_role_and_no_login(trust):
    now = [time.time()]
    later = keyring.Keyring(trust.folder, "lab", clock=lambda: now[0])
    later.issue("ann", OPERATOR, lifetime_s=60)
    later.passwords().set("ann", OPERATOR, PASSWORD)
    role_of, known = identity_roles.IdentityRoles(later), later.passwords()
    assert (role_of("ann"), known.current("ann").role) == (OPERATOR, OPERATOR)
    now[0] += 61
    assert role_of("ann") is None
    with pytest.raises(errors.Unauthorized, match="expired"):
        known.current("ann")
    with pytest.raises(errors.Unauthorized, match="expired"):
        identities.login_credentials(later, "ann", OPERATOR)
    later.renew("ann", lifetime_s=60)
    assert role_of("ann") == OPERATOR


async def test_a_narrowed_login_only_looks_and_ends_with_its_identity(trust, tmp_path: Path):
    for name, role in (("ann", USER), ("ann-viewer", VIEWER), ("server", roles.Role.REGISTRY)):
        trust.issue(name, role)
    trust.issue("system", roles.Role.SYSTEM)
    async with servers.server(tmp_path, trust) as broker:
        login = identities.login_credentials(trust, "ann", VIEWER)
        async with (
            await client.connect([broker.url], creds=login) as bus,
            await client.connect([broker.url], creds=trust.credentials("ann-viewer")) as other,
            await client.connect([broker.url], creds=trust.credentials("server")) as server,
        ):
            heard: list[api.Message] = []
            await other.subscribe("_R.*.ann-viewer.>", handler=heard.append)
            await server.subscribe("muster.manage.from.*.read.>", handler=_reply)
            await asyncio.gather(other.flush(), server.flush())
            answer = await rpc_client.exchange_once(bus, "muster.manage.from.ann.read.list", b"")
            assert answer.data == b"rows"
            for subject in ("muster.manage.from.ann.request.apply", "topic.news"):
                with pytest.raises(errors.Forbidden):
                    await bus.request(subject, b"", timeout_s=5)
            await other.flush()
            assert heard == []
            trust.revoke("ann")
            await identities.publish_accounts(trust, [broker.url])
            await eventually(lambda: bus.state is not api.ConnectionState.CONNECTED)
        with pytest.raises(errors.Unauthorized):
            await client.connect([broker.url], creds=login)


async def _reply(message: api.Message) -> None:
    await message.respond(b"rows")
