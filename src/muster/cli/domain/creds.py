"""``muster creds``: credentials for connections to the brokers."""

from __future__ import annotations

import contextlib
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, live_names
from muster.cli.domain import config

if TYPE_CHECKING:
    from muster.trust import credential_records, keyring


LIST_S = 5.0  # for the list of brokers

# A copy of `muster.trust.permissions.roles.Role`, which help pages should not import; a test compares them.
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
    "reader",
    "web",
    "link",
)


@click.group(cls=command.MusterGroup, examples=[("muster creds list", "")])
def creds() -> None:
    """Issue, revoke and show credentials."""


def _trust(invocation: command.Invocation) -> keyring.Keyring:
    from muster.app import identities

    return identities.open_keyring(config.load(invocation))


def _plain(record: credential_records.CredentialRecord) -> dict[str, Any]:
    return {
        "identity": record.identity,
        "role": record.role,
        "status": record.status,
        "issued": _time(record.issued_at),
        "issued_at": record.issued_at,
        "expires": _time(record.expires_at) if record.expires_at else None,
        "expires_at": record.expires_at or None,
        "public_key": record.public_key,
        "publish": list(record.publish),
        "subscribe": list(record.subscribe),
        "queues": [str(grant) for grant in record.queues],
        "shell": record.may_run_commands,
    }


def _time(at_s: int) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat().replace("+00:00", "Z")


@creds.command(
    acts=("issue", "{identity} as {role}"),
    examples=[
        ("muster creds issue alice", "a user: may publish and receive on topics"),
        ("muster creds issue node-7 --role agent --lifetime 30d --to node-7.creds", ""),
        ("muster creds issue meter --topic 'meters/>'", "only these topics"),
        ("muster creds issue eve --role operator --shell", "an operator with `muster exec NAME -- COMMAND`"),
        ("muster creds issue shop --queue 'orders:send' --queue 'receipts-*:receive,browse'", ""),
    ],
)
@click.argument("identity")
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="user",
    show_default=True,
    metavar="ROLE",
    help=f"Role of the identity: {', '.join(ROLES)}.",
)
@click.option(
    "--topic",
    "patterns",
    metavar="TOPIC",
    multiple=True,
    shell_complete=live_names.TOPIC_PATTERNS,
    help="Only these topics, wildcards allowed; may be repeated.",
)
@click.option(
    "--queue",
    "grants",
    multiple=True,
    metavar="NAME:RIGHTS",
    help="Only these queues, * allowed, with send, receive, browse, admin; may be repeated. "
    "Default: a user may send, receive and browse in all queues but dead-letters; with --topic, in none.",
)
@click.option(
    "--shell", is_flag=True, help="It may run commands inside resources; only with the role operator."
)
@command.duration("--lifetime", None, "Lifetime such as 30d or 12h (default: from the settings).")
@click.option(
    "--to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the file to this path ('-': stdout).",
)
@command.pass_invocation
def issue(
    invocation: command.Invocation,
    identity: str,
    role: str,
    patterns: tuple[str, ...],
    grants: tuple[str, ...],
    shell: bool,
    lifetime_s: float | None,
    to: Path | None,
) -> None:
    """Issue credentials for an identity.

    The file contains a private key: give it only to the process or person that it identifies.
    """
    from muster.core import topics
    from muster.trust.permissions import own_names, queue_rights, roles

    settings = config.load(invocation)
    lifetime_s = lifetime_s or settings.trust.credential_lifetime_s
    trust = _trust(invocation)
    allowed = tuple(subject for text in patterns for subject in topics.TopicPattern.parse(text).permitted())
    chosen = roles.Role.named(role)
    if shell and chosen is not roles.Role.OPERATOR:
        raise click.UsageError("--shell needs --role operator")
    own_names.check(identity, chosen, of_machine=not _was_revoked(trust, identity))
    trust.issue(
        identity,
        chosen,
        lifetime_s=lifetime_s or None,
        topics=allowed or None,
        queue_grants=tuple(map(queue_rights.QueueGrant.parse, grants)) or None,
        may_run_commands=shell,
    )
    _hand_over(invocation, trust, identity, to)


def _was_revoked(trust: keyring.Keyring, identity: str) -> bool:
    """Then new credentials readmit it."""
    from muster.core import errors

    with contextlib.suppress(errors.NotFound):
        return trust.show(identity).status == "revoked"
    return False


def _hand_over(
    invocation: command.Invocation, trust: keyring.Keyring, identity: str, to: Path | None
) -> None:
    """Write the credentials to the requested place and print their description."""
    from muster.core import errors, files

    path = trust.credentials_path(identity)
    if to is not None and not path.exists():
        raise errors.NotFound(
            f"the key of {identity} is not stored here", hint="renew the credentials where the key is stored"
        )
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
@click.argument("identity", shell_complete=live_names.IDENTITIES)
@command.duration("--lifetime", None, "Lifetime such as 30d or 12h (default: from the settings).")
@click.option(
    "--to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the file to this path ('-': stdout).",
)
@command.pass_invocation
def renew(invocation: command.Invocation, identity: str, lifetime_s: float | None, to: Path | None) -> None:
    """Extend the credentials of an identity, with the same key and permissions.

    The process that uses them needs the new file. Credentials that were revoked have to be issued anew.
    """
    settings = config.load(invocation)
    trust = _trust(invocation)
    trust.renew(identity, lifetime_s=lifetime_s or settings.trust.credential_lifetime_s or None)
    _hand_over(invocation, trust, identity, to)


@creds.command(
    acts=("revoke", "{identity}"),
    examples=[("muster creds revoke alice", "open connections are closed")],
)
@click.argument("identity", shell_complete=live_names.IDENTITIES)
@command.pass_invocation
def revoke(invocation: command.Invocation, identity: str) -> None:
    """Revoke the credentials of an identity.

    Brokers reject it from now on and close its connections. The command fails if a broker has not confirmed
    this; repeat it then. If the domain does not run, this takes effect at the next start.
    """
    from muster.core import errors

    record = _trust(invocation).revoke(identity)
    try:
        published = command.run(_tell(invocation))
    except errors.MusterError as error:
        # Not `errors.Unavailable`: something was done, so the activity log records it.
        raise (errors.TimedOut if isinstance(error, errors.Unavailable) else type(error))(
            f"the revocation of {identity} is stored, but {error.message}",
            hint=f"until then they may accept {identity}: repeat the command when they reply",
        ) from error
    when = "from now on" if published else "at the next start of the domain"
    invocation.printer.done({**_plain(record), "told_brokers": published}, f"{identity} is revoked {when}")


@creds.command("list", examples=[("muster creds list", "")])
@command.pass_invocation
def list_(invocation: command.Invocation) -> None:
    """List the issued credentials."""
    rows = [_plain(record) for record in _trust(invocation).records()]
    invocation.printer.rows(
        rows, ("identity", "role", "status", "issued_at", "expires_at", "queues?", "shell?")
    )


@creds.command(examples=[("muster creds show alice", "with its permissions")])
@click.argument("identity", shell_complete=live_names.IDENTITIES)
@command.pass_invocation
def show(invocation: command.Invocation, identity: str) -> None:
    """Show the credentials and permissions of an identity."""
    trust = _trust(invocation)
    facts = _plain(trust.show(identity))
    path = trust.credentials_path(identity)
    facts["file"] = str(path) if path.exists() else None
    invocation.printer.facts(facts)


async def _tell(invocation: command.Invocation) -> bool:
    """Publish revocations to all brokers. False if the domain starts them and does not run."""
    import ssl

    from muster.app import home, identities
    from muster.bus.brokers import control
    from muster.bus.client import client
    from muster.core import errors

    settings, trust = config.load(invocation), _trust(invocation)
    servers, tls = settings.bus.servers, None
    if not servers:
        running = home.DomainFolder(settings.domain.folder).running()
        if running is None:
            return False
        servers = running.servers
        tls = ssl.create_default_context(cafile=running.ca) if running.ca else None
        # Leaves too. The domain's process passes accounts on to them, if it does not reply now.
        with contextlib.suppress(errors.MusterError):
            name = identities.ADMINISTRATOR
            creds = identities.credentials(trust, name, identities.OWN[name])
            async with await client.connect(servers, creds=creds, tls=tls) as bus:
                rows = await control.BrokerControl(bus, timeout_s=LIST_S).brokers()
            # One that does not run receives the account when it is started.
            own = tuple(row.url for row in rows if row.url and row.pid)
            servers = (*own, *running.remote_servers)
    await identities.publish_accounts(trust, servers, tls=tls)
    return True
