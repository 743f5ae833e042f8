"""The identities of the domain itself and their credentials.

`muster init` creates them; an embedded domain creates them at its first start. Functions that are not async
access files and block: call them in a thread.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from pathlib import Path

import msgspec

from muster.bus.client import client
from muster.core import errors
from muster.core.settings import domain as settings_domain
from muster.trust import credentials as credentials_
from muster.trust import keyring
from muster.trust.permissions import roles

CONFIRM_S = 3.0  # for the connection to a broker, and for its confirmation of an account

SELF = "bootstrap"  # the domain's own process
LINK = "link"  # the identity of the domain's brokers at other brokers
SYSTEM = "system"  # sends changed accounts to brokers
ADMINISTRATOR = "admin"  # the owner of the home

OWN = {
    SELF: roles.Role.BOOTSTRAP,
    SYSTEM: roles.Role.SYSTEM,
    ADMINISTRATOR: roles.Role.OPERATOR,
}


def open_keyring(settings: settings_domain.BaseSettings) -> keyring.Keyring:
    return keyring.Keyring.open(settings.keys_folder)


def open_or_create(settings: settings_domain.BaseSettings) -> keyring.Keyring:
    """The domain's keyring, created if it does not exist, with the domain's own identities."""
    if settings.keys_folder.exists():
        trust = open_keyring(settings)
        check_complete(trust, settings)
        if settings.domain.name not in trust.domains():
            raise errors.Conflict(
                f"the keys in {settings.keys_folder} are those of {', '.join(trust.domains())}, "
                f"not of the domain {settings.domain.name!r}",
                hint="change domain.name, or name another folder of keys",
            )
    else:
        trust = keyring.Keyring.create(settings.keys_folder, settings.domain.name)
    if trust.signs:
        trust.key_of_secrets()  # made now, if these keys are of 0.1.0
    if trust.of_machine:  # it has what its roles need
        return trust
    for identity, role in OWN.items():  # including those that an interrupted `muster init` left out
        credentials_file(trust, identity, role)
    return trust


def check_complete(trust: keyring.Keyring, settings: settings_domain.BaseSettings) -> None:
    """`errors.NotFound` with the names of missing key files."""
    missing = trust.missing_files()
    if missing:
        raise errors.NotFound(
            f"missing key files: {', '.join(map(str, missing))}",
            hint="restore them from a backup; docs/guides/lost-keys.md",
        )


def credentials_file(trust: keyring.Keyring, identity: str, role: roles.Role) -> Path:
    """The credentials file of ``identity``; credentials are issued if there are no valid ones.

    A revoked identity stays revoked: only `muster creds issue` readmits it.
    """
    domain = keyring.SYSTEM if role is roles.Role.SYSTEM else None
    try:
        record = trust.show(identity, domain=domain)
    except errors.NotFound:
        if trust.of_machine:
            raise errors.NotFound(
                f"this machine joined without credentials for {identity!r}",
                hint="`muster machine remove` it, and join again with a token that has the role",
            ) from None
        trust.issue(identity, role, may_run_commands=identity == ADMINISTRATOR)
    else:
        if record.status == "revoked":
            raise errors.Unauthorized(
                f"{identity!r} was revoked", hint=f"`muster creds issue {identity}` issues a new key"
            )
        if record.role != role.value:
            raise errors.Conflict(
                f"{identity!r} has the role {record.role}, not {role.value}",
                hint="choose another name: an identity has one role",
            )
        if record.status == "expired":
            trust.renew(identity, domain=domain)
    return trust.credentials_path(identity, domain=domain)


def credentials(trust: keyring.Keyring, identity: str, role: roles.Role) -> credentials_.Credentials:
    """The credentials in `credentials_file`."""
    return credentials_.Credentials.load(credentials_file(trust, identity, role))


def login_credentials(trust: keyring.Keyring, identity: str, role: roles.Role) -> credentials_.Credentials:
    """The credentials with which a gateway acts for a login: those of its identity, or narrower ones.

    The identity is made if there is none: that of anonymous clients, or of readers of the UDDI registry.
    """
    try:
        return trust.narrowed(identity, role)
    except errors.NotFound:
        trust.provide_login(identity, role)
        return trust.narrowed(identity, role)


def system_credentials(trust: keyring.Keyring) -> credentials_.Credentials:
    return credentials(trust, SYSTEM, OWN[SYSTEM])


async def publish_accounts(
    trust: keyring.Keyring, servers: Iterable[str], *, tls: ssl.SSLContext | None = None
) -> None:
    """Send the current account to running brokers: they disconnect and refuse revoked identities.

    Every one of ``servers`` has confirmed it when this returns; the error names those that have not.
    """
    subject, claims = await asyncio.to_thread(trust.claims_update)
    creds = await asyncio.to_thread(system_credentials, trust)
    urls = tuple(servers)

    async def publish(url: str) -> errors.MusterError | None:
        try:
            async with await client.connect(
                [url], creds=creds, tls=tls, connect_timeout_s=CONFIRM_S, audit_s=0
            ) as system:
                # All brokers of its cluster reply: the reply of this one may be later than those of others.
                for enough in (len(urls), None):
                    for reply in await system.gather(subject, claims, enough=enough, timeout_s=CONFIRM_S):
                        answer = msgspec.json.decode(reply.data)
                        if system.connection and answer["server"]["id"] == system.connection.broker:
                            if "error" not in answer:
                                return None
                            return errors.Refused(f"rejected the new account: {answer['error']}")
            return errors.TimedOut("did not confirm the new account")
        except errors.MusterError as error:
            return error

    outcomes = await asyncio.gather(*map(publish, urls))
    failures = {url: error for url, error in zip(urls, outcomes, strict=True) if error is not None}
    if failures:
        lost = all(isinstance(error, errors.Unavailable) for error in failures.values())
        reasons = "; ".join(f"{url}: {error.message}" for url, error in failures.items())
        raise (errors.Unavailable if lost else errors.Refused)(
            f"{len(failures)} of {len(urls)} brokers did not confirm the new account: {reasons}",
            hint="a broker that was down receives it from the others after its start",
        )
