"""``muster profile``: manage named connection settings (`muster.client.profiles`)."""

from __future__ import annotations

from pathlib import Path

import click

from muster.cli import command
from muster.core import errors


@click.group(cls=command.MusterGroup, examples=[("muster profile list", "")])
def profile() -> None:
    """Manage named connection settings."""


@profile.command("list", examples=[("muster profile list -o json", "")])
@command.pass_invocation
def list_(invocation: command.Invocation) -> None:
    """List the profiles of this user."""
    from muster.client import profiles

    now = profiles.current()
    rows = [
        {
            "name": name,
            "current": name == now,
            "servers": list(loaded.servers),
            "locator": loaded.locator or None,
            "home": loaded.home or None,
        }
        for name in profiles.names()
        for loaded in [profiles.load(name)]
    ]
    invocation.printer.rows(
        rows,
        ("name", "current", "servers", "locator", "home"),
        empty="there are no profiles; create one with `muster profile add NAME --server URL --creds FILE`",
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
@click.option("--locator", default="", metavar="URL", help="A locator, which recommends a broker.")
@click.option("--creds", type=click.Path(dir_okay=False, path_type=Path), help="File of credentials.")
@click.option(
    "--ca", type=click.Path(dir_okay=False, path_type=Path), help="Certificate authority of the brokers."
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
    """Create or replace a profile."""
    from muster.client import profiles

    home = None if servers or locator else invocation.home
    if not (servers or locator or home):
        raise errors.InvalidInput(
            "a profile needs a server, a locator or a home", hint="give --server, --locator or --home"
        )
    made = profiles.Profile(
        servers=servers,
        locator=locator,
        creds=str(creds.absolute()) if creds else "",
        ca=str(ca.absolute()) if ca else "",
        home=str(home.absolute()) if home else "",
    )
    path = profiles.save(name, made)
    invocation.printer.done({"name": name, "file": str(path)}, f"profile {name} was written to {path}")


@profile.command(examples=[("muster profile use prod", "")])
@click.argument("name", shell_complete=command.complete_profiles)
@command.pass_invocation
def use(invocation: command.Invocation, name: str) -> None:
    """Make a profile the default."""
    from muster.client import profiles

    profiles.use(name)
    invocation.printer.done({"current": name}, f"{name} is now the current profile")


@profile.command(examples=[("muster profile show", "the current profile"), ("muster profile show prod", "")])
@click.argument("name", required=False, shell_complete=command.complete_profiles)
@command.pass_invocation
def show(invocation: command.Invocation, name: str | None) -> None:
    """Show a profile."""
    from muster.client import profiles

    chosen = name or invocation.profile or profiles.current()
    if chosen is None:
        raise errors.NotFound("no profile is in use", hint="choose one with `muster profile use NAME`")
    loaded = profiles.load(chosen)
    invocation.printer.facts(
        {
            "name": chosen,
            "servers": list(loaded.servers),
            "locator": loaded.locator,
            "creds": loaded.creds,
            "ca": loaded.ca,
            "home": loaded.home,
        }
    )


@profile.command(examples=[("muster profile delete prod", "")])
@click.argument("name", shell_complete=command.complete_profiles)
@command.pass_invocation
def delete(invocation: command.Invocation, name: str) -> None:
    """Delete a profile."""
    from muster.client import profiles

    profiles.remove(name)
    invocation.printer.done({"deleted": name}, f"profile {name} was deleted")
