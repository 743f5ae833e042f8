"""``muster web``: the logins and tokens of the dashboard and the REST API."""

from __future__ import annotations

import sys

import click

from muster.cli import command, live_names
from muster.cli.domain import config

ROLES = ("viewer", "operator", "admin")


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster web password", "create the administrator's password and print it"),
        ("muster web token create ann", "print a new token for the REST API"),
    ],
)
def web() -> None:
    """Manage the logins and tokens of the dashboard.

    They are those of the REST API too. `muster up` serves both, unless the setting web.enabled is false;
    `muster run web` serves them in a process beside it.
    """


@web.command(
    acts=("set-login", "{name}"),
    examples=[
        ("muster web password", "generate a password for `admin` and print it"),
        ("echo 'a long secret' | muster web password ann --role operator", ""),
    ],
)
@click.argument("name", default="admin", shell_complete=live_names.LOGINS)
@click.option(
    "--role", type=click.Choice(ROLES), help="Role of NAME (default: admin for `admin`, else viewer)."
)
@click.option("--ask", is_flag=True, help="Prompt for the password instead of generating one.")
@command.pass_invocation
def password(invocation: command.Invocation, name: str, role: str | None, ask: bool) -> None:
    """Set NAME's password for the dashboard and the REST API.

    The password is read from stdin if stdin is not a terminal; otherwise it is generated and printed.
    """
    from muster.app import identities
    from muster.app.components import web as web_

    entered = ""
    if ask and not sys.stdin.isatty():
        raise click.UsageError("--ask requires a terminal; without it the password is read from stdin")
    if ask:
        entered = click.prompt("password", hide_input=True, confirmation_prompt=True)
    elif not sys.stdin.isatty():
        entered = sys.stdin.readline().rstrip("\n")
    chosen = role or ("admin" if name == web_.ADMINISTRATOR else "viewer")
    trust = identities.open_keyring(config.load(invocation))
    made = web_.set_password(trust, name, role=chosen, password=entered)
    facts = {"name": name, "role": chosen} | ({} if entered else {"password": made})
    invocation.printer.done(
        facts, f"{name} can log in as {chosen}" + ("" if entered else f" with the password {made}")
    )


@web.command(examples=[("muster web logins", "")])
@command.pass_invocation
def logins(invocation: command.Invocation) -> None:
    """List the logins."""
    from muster.app import identities
    from muster.web.auth import logins as logins_

    rows = logins_.login_rows(identities.open_keyring(config.load(invocation)).passwords())
    invocation.printer.rows(rows, logins_.LOGINS, empty="there are no logins")


@web.command(acts=("remove-login", "{name}"), examples=[("muster web forget ann", "")])
@click.argument("name", shell_complete=live_names.LOGINS)
@command.pass_invocation
def forget(invocation: command.Invocation, name: str) -> None:
    """Revoke NAME's login. Its sessions end within seconds."""
    from muster.app import identities

    identities.open_keyring(config.load(invocation)).passwords().remove(name)
    invocation.printer.done({"name": name}, f"the login of {name} was revoked")


@web.group(
    cls=command.MusterGroup,
    examples=[
        ("muster web token create ann --scope alerts:read --description grafana", "print a new token"),
        ("muster web token list", ""),
        ("muster web token revoke 0f4c2a9be1d37788", ""),
    ],
)
def token() -> None:
    """Create, list and revoke API tokens of the REST API."""


@token.command(
    acts=("create-token", "{owner}"),
    examples=[
        ("muster web token create ann", "with ann's role, for the lifetime web.token_s"),
        ("muster web token create ann --role viewer --lifetime 90d", ""),
        ("muster web token create ann --scope alerts --scope reports:read", "only for alerts and reports"),
    ],
)
@click.argument("owner", shell_complete=live_names.LOGINS)
@click.option(
    "--role", type=click.Choice(ROLES), help="Role of the token (default and maximum: OWNER's role)."
)
@click.option(
    "--scope",
    "scopes_",
    multiple=True,
    metavar="AREA[:read]",
    help="A part of the API, such as alerts or alerts:read; may be repeated (default: all).",
)
@command.duration("--lifetime", None, "Lifetime such as 90d (default and maximum: web.token_s).")
@click.option("--description", default="", help="What the token is for.")
@command.pass_invocation
def create(
    invocation: command.Invocation,
    owner: str,
    role: str | None,
    scopes_: tuple[str, ...],
    lifetime_s: float | None,
    description: str,
) -> None:
    """Create an API token of OWNER, who must have a login, and print it. It is not shown again."""
    import asyncio

    import msgspec

    from muster.app import home, identities
    from muster.app.components import web as web_
    from muster.web.auth import logins as logins_
    from muster.web.auth import sessions

    settings = config.load(invocation)
    trust = identities.open_keyring(settings)
    folder = home.DomainFolder(settings.domain.folder)
    service = logins_.LoginService(trust.passwords(), folder.root / "web", settings.web)
    text, record = asyncio.run(
        service.create_token(
            web_.token_owner(trust, owner),
            role=sessions.WebRole(role) if role else None,
            scopes_=scopes_,
            description=description,
            lifetime_s=lifetime_s,
        )
    )
    facts = {**msgspec.to_builtins(record.row), "token": text}
    invocation.printer.done(facts, text)


@token.command("list", examples=[("muster web token list", ""), ("muster web token list ann", "")])
@click.argument("owner", required=False, shell_complete=live_names.LOGINS)
@command.pass_invocation
def list_(invocation: command.Invocation, owner: str | None) -> None:
    """List the API tokens that have not expired, of OWNER or of all logins."""
    import msgspec

    from muster.app import home
    from muster.app.components import web as web_
    from muster.web.auth import tokens

    store = web_.open_tokens(home.DomainFolder(config.load(invocation).domain.folder))
    rows = [msgspec.to_builtins(record.row) for record in store.list(owner)]
    invocation.printer.rows(rows, tokens.TOKENS, empty="there are no tokens")


@token.command(acts=("revoke-token", "{id}"), examples=[("muster web token revoke 0f4c2a9be1d37788", "")])
@click.argument("id")
@command.pass_invocation
def revoke(invocation: command.Invocation, id: str) -> None:
    """Revoke the token ID at once."""
    from muster.app import home
    from muster.app.components import web as web_

    record = web_.open_tokens(home.DomainFolder(config.load(invocation).domain.folder)).revoke(id)
    invocation.printer.done(
        {"id": id, "owner": record.owner}, f"the token {id} of {record.owner} was revoked"
    )
