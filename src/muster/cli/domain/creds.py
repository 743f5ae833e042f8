"""``muster creds``: who may connect, as what."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command
from muster.cli.domain import config as config_

if TYPE_CHECKING:
    from muster.trust import keyring


# Of `muster.trust.permissions.roles.Role`, which is not imported for a help page; a test compares them.
ROLES = (
    "user",
    "agent",
    "manager",
    "registry",
    "bootstrap",
    "notifier",
    "channel",
    "pipeline",
    "gateway",
    "information-node",
    "responder",
    "authority",
    "operator",
    "viewer",
    "web",
    "link",
)


@click.group(cls=command.MusterGroup, examples=[("muster creds list", "")])
def creds() -> None:
    """Issue, revoke and show credentials."""


def _trust(invocation: command.Invocation) -> keyring.Keyring:
    from muster.app import identities

    return identities.open_keyring(config_.load(invocation))


def _plain(record: keyring.CredentialRecord) -> dict[str, Any]:
    return {
        "identity": record.identity,
        "role": record.role,
        "status": record.status,
        "issued": _time(record.issued_at),
        "expires": _time(record.expires_at) if record.expires_at else None,
        "public_key": record.public_key,
        "publish": list(record.publish),
        "subscribe": list(record.subscribe),
        "queues": [str(grant) for grant in record.queues],
    }


def _time(at_s: int) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat().replace("+00:00", "Z")


@creds.command(
    acts=("issue", "{identity} as {role}"),
    examples=[
        ("muster creds issue alice", "a user: may publish and receive on topics"),
        ("muster creds issue node-7 --role agent --lifetime 30d --to node-7.creds", ""),
        ("muster creds issue meter --topic 'meters/>'", "only these topics"),
        ("muster creds issue shop --queue 'orders:send' --queue 'receipts-*:receive,browse'", ""),
    ],
)
@click.argument("identity")
@click.option("--role", type=click.Choice(ROLES), default="user", show_default=True, help="What it is.")
@click.option(
    "--topic", "patterns", multiple=True, help="Only these topics, wildcards allowed; may be repeated."
)
@click.option(
    "--queue",
    "grants",
    multiple=True,
    metavar="NAME:RIGHTS",
    help="Only these queues, * allowed, with send, receive, browse, admin; may be repeated. "
    "Default: a user may send, receive and browse everywhere but in dead-letters; with --topic, nowhere.",
)
@command.duration("--lifetime", None, "How long they hold (30d, 12h); default: the settings'.")
@click.option(
    "--to", type=click.Path(dir_okay=False, path_type=Path), help="Also copy the file there ('-': stdout)."
)
@command.pass_invocation
def issue(
    invocation: command.Invocation,
    identity: str,
    role: str,
    patterns: tuple[str, ...],
    grants: tuple[str, ...],
    lifetime_s: float | None,
    to: Path | None,
) -> None:
    """Give an identity credentials.

    The file holds a secret: hand it to the process it is for and to nobody else.
    """
    from muster.core import topics
    from muster.trust.permissions import queue_rights, roles

    settings = config_.load(invocation)
    lifetime_s = lifetime_s or settings.trust.credential_lifetime_s
    trust = _trust(invocation)
    allowed = tuple(subject for text in patterns for subject in topics.TopicPattern.parse(text).permitted())
    trust.issue(
        identity,
        roles.Role.named(role),
        lifetime_s=lifetime_s or None,
        topics=allowed or None,
        queue_grants=tuple(map(queue_rights.QueueGrant.parse, grants)) or None,
    )
    _hand_over(invocation, trust, identity, to)


def _hand_over(
    invocation: command.Invocation, trust: keyring.Keyring, identity: str, to: Path | None
) -> None:
    """Copy the credentials where they are wanted, and describe them."""
    from muster.core import errors, files

    path = trust.credentials_path(identity)
    if to is not None and not path.exists():
        raise errors.NotFound(f"the key of {identity} is not kept here", hint="renew it where its key is")
    if to == Path("-"):
        sys.stdout.write(path.read_text())
        return
    if to is not None:
        files.write(to, path.read_bytes())
    record = trust.show(identity)
    file = str(to or path)
    until = f", until {_time(record.expires_at)}" if record.expires_at else ""
    invocation.printer.done(
        {**_plain(record), "file": file}, f"{identity} may connect as {record.role}{until} with {file}"
    )


@creds.command(
    acts=("renew", "{identity}"),
    examples=[("muster creds renew alice --to alice.creds", "the same key, valid for longer")],
)
@click.argument("identity")
@command.duration("--lifetime", None, "How long they hold (30d, 12h); default: the settings'.")
@click.option(
    "--to", type=click.Path(dir_okay=False, path_type=Path), help="Also copy the file there ('-': stdout)."
)
@command.pass_invocation
def renew(invocation: command.Invocation, identity: str, lifetime_s: float | None, to: Path | None) -> None:
    """Extend the credentials of an identity, with the same key and permissions.

    The process that uses them needs the new file. Credentials that were revoked have to be issued anew.
    """
    settings = config_.load(invocation)
    trust = _trust(invocation)
    trust.renew(identity, lifetime_s=lifetime_s or settings.trust.credential_lifetime_s or None)
    _hand_over(invocation, trust, identity, to)


@creds.command(
    acts=("revoke", "{identity}"),
    examples=[("muster creds revoke alice", "refused from now on, and cut off where connected")],
)
@click.argument("identity")
@command.pass_invocation
def revoke(invocation: command.Invocation, identity: str) -> None:
    """Take an identity's credentials away.

    Brokers refuse it from now on, and cut the connections it has. If the domain does not run, the
    brokers learn of it at the next start.
    """
    record = _trust(invocation).revoke(identity)
    told = command.run(_tell(invocation))
    when = "from now on" if told else "when the domain is started"
    invocation.printer.done({**_plain(record), "told_brokers": told}, f"{identity} is refused {when}")


@creds.command("list", examples=[("muster creds list", "")])
@command.pass_invocation
def list_(invocation: command.Invocation) -> None:
    """List who has credentials."""
    rows = [_plain(record) for record in _trust(invocation).records()]
    invocation.printer.rows(rows, ("identity", "role", "status", "issued", "expires", "queues"))


@creds.command(examples=[("muster creds show alice", "with its permissions")])
@click.argument("identity")
@command.pass_invocation
def show(invocation: command.Invocation, identity: str) -> None:
    """Show the credentials of one identity, and what it may."""
    trust = _trust(invocation)
    facts = _plain(trust.show(identity))
    path = trust.credentials_path(identity)
    facts["file"] = str(path) if path.exists() else None
    invocation.printer.facts(facts)


async def _tell(invocation: command.Invocation) -> bool:
    """Whether there were running brokers to tell."""
    import ssl

    from muster.app import home, identities

    settings = config_.load(invocation)
    running = home.DomainFolder(settings.domain.folder).running()
    if running is None:
        return False
    tls = ssl.create_default_context(cafile=running.ca) if running.ca else None
    await identities.publish_accounts(_trust(invocation), running.servers, tls=tls)
    return True
