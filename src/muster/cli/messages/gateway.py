"""``muster gateway``: the logins of gateways for other protocols."""

from __future__ import annotations

import contextlib

import click

from muster.cli import command, live_names
from muster.cli.domain import config, creds

# The role `link` is for brokers, not for clients.
ROLES = tuple(role for role in creds.ROLES if role != "link")


@click.group(cls=command.MusterGroup, examples=[("muster gateway password ann", "prompts for the password")])
def gateway() -> None:
    """Set the passwords of the clients of gateways.

    The gateways are components: `muster run amqp` serves AMQP 1.0, and `muster run soap` WS-Management,
    WS-Context and UDDI. `muster up` serves them too if amqp.enabled or soap.enabled is set.
    """


@gateway.command(
    acts=("set-login", "{name}"),
    examples=[
        ("muster gateway password ann", "prompts for the password"),
        ("echo 'a long secret' | muster gateway password ann", ""),
    ],
)
@click.argument("name", shell_complete=live_names.LOGINS)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    metavar="ROLE",
    help="That of the identity NAME, or viewer (default: unchanged; user for a new identity).",
)
@command.pass_invocation
def password(invocation: command.Invocation, name: str, role: str | None) -> None:
    """Set NAME's password for the gateways.

    The login acts as the identity NAME, with its role or as a viewer. The identity is created if there is
    none.
    """
    import sys

    from muster.app import identities
    from muster.core import errors
    from muster.trust.permissions import roles

    entered = (
        click.prompt("password", hide_input=True, confirmation_prompt=True)
        if sys.stdin.isatty()
        else sys.stdin.readline().rstrip("\n")
    )
    trust = identities.open_keyring(config.load(invocation))
    for known in (trust.passwords().get, trust.show):
        if role is None:
            with contextlib.suppress(errors.NotFound):
                role = known(name).role
    role = role or "user"
    trust.passwords().set(name, roles.Role(role), entered, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    invocation.printer.done({"name": name, "role": role}, f"{name} can log in as {role}")
