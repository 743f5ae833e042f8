"""``muster profile``: see, make and choose named connection settings (`muster.cli.profiles`)."""

from __future__ import annotations

from pathlib import Path

import click

from muster.cli import command
from muster.core import errors


@click.group(cls=command.MusterGroup, examples=[("muster profile list", "")])
def profile() -> None:
    """Named connection settings."""


@profile.command("list", examples=[("muster profile list -o json", "")])
@command.pass_invocation
def list_(invocation: command.Invocation) -> None:
    """List the profiles of this user."""
    from muster.cli import profiles

    now = profiles.current()
    rows = [
        {
            "name": name,
            "current": name == now,
            "servers": list(found.servers),
            "locator": found.locator or None,
            "home": found.home or None,
        }
        for name in profiles.names()
        for found in [profiles.load(name)]
    ]
    invocation.printer.rows(
        rows,
        ("name", "current", "servers", "locator", "home"),
        empty="no profiles yet: make one with `muster profile add NAME --server URL --creds FILE`",
    )


@profile.command(
    "add",
    examples=[
        ("muster profile add prod --server tls://bus.example:4222 --creds ops.creds --ca ca.pem", ""),
        ("muster profile add lab --home ./lab/.muster", "the domain of a home on this machine"),
    ],
)
@click.argument("name")
@click.option("--server", "servers", multiple=True, metavar="URL", help="A broker; may be repeated.")
@click.option("--locator", default="", metavar="URL", help="A locator to ask for the best broker.")
@click.option("--creds", type=click.Path(dir_okay=False, path_type=Path), help="File of credentials.")
@click.option(
    "--ca", type=click.Path(dir_okay=False, path_type=Path), help="Authority of the brokers' certificates."
)
@command.pass_invocation
def add(
    invocation: command.Invocation,
    name: str,
    servers: tuple[str, ...],
    locator: str,
    creds: Path | None,
    ca: Path | None,
) -> None:
    """Make a profile, or replace the one of that name."""
    from muster.cli import profiles

    home = None if servers or locator else invocation.home
    if not (servers or locator or home):
        raise errors.InvalidInput(
            "a profile needs something to connect to", hint="give --server, --locator or --home"
        )
    made = profiles.Profile(
        servers=servers,
        locator=locator,
        creds=str(creds.absolute()) if creds else "",
        ca=str(ca.absolute()) if ca else "",
        home=str(home.absolute()) if home else "",
    )
    path = profiles.save(name, made)
    invocation.printer.done({"name": name, "file": str(path)}, f"profile {name} is in {path}")


@profile.command(examples=[("muster profile use prod", "")])
@click.argument("name", shell_complete=command.complete_profiles)
@command.pass_invocation
def use(invocation: command.Invocation, name: str) -> None:
    """Make a profile the one used when none is named."""
    from muster.cli import profiles

    profiles.use(name)
    invocation.printer.done({"current": name}, f"{name} is now the current profile")


@profile.command(examples=[("muster profile show", "the current one"), ("muster profile show prod", "")])
@click.argument("name", required=False, shell_complete=command.complete_profiles)
@command.pass_invocation
def show(invocation: command.Invocation, name: str | None) -> None:
    """Show one profile."""
    from muster.cli import profiles

    chosen = name or invocation.profile or profiles.current()
    if chosen is None:
        raise errors.NotFound("no profile is in use", hint="choose one with `muster profile use NAME`")
    found = profiles.load(chosen)
    invocation.printer.facts(
        {
            "name": chosen,
            "servers": list(found.servers),
            "locator": found.locator,
            "creds": found.creds,
            "ca": found.ca,
            "home": found.home,
        }
    )


@profile.command(examples=[("muster profile delete prod", "")])
@click.argument("name", shell_complete=command.complete_profiles)
@command.pass_invocation
def delete(invocation: command.Invocation, name: str) -> None:
    """Forget a profile."""
    from muster.cli import profiles

    profiles.remove(name)
    invocation.printer.done({"deleted": name}, f"profile {name} is gone")
