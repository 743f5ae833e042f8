"""``muster systemd``: the systemd unit of a domain."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from muster.cli import command


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster systemd --home /var/lib/muster --user muster > /etc/systemd/system/muster.service", ""),
        ("muster systemd > ~/.config/systemd/user/muster.service", "for the service manager of a user"),
    ],
)
@click.option(
    "--user",
    metavar="NAME",
    default="",
    help="The system user who runs the domain; by default a user's own unit.",
)
@click.option(
    "--program",
    type=click.Path(path_type=Path),
    help="The muster program that the unit starts; by default the one that runs now.",
)
@command.pass_invocation
def systemd(invocation: command.Invocation, user: str, program: Path | None) -> None:
    """Print a systemd unit that runs the domain of a home.

    It starts the domain with the machine, and restarts it after a crash and when it does not respond.
    """
    from muster.app import home
    from muster.app.machines import program as program_
    from muster.app.operations import systemd_unit

    chosen = program or Path(program_.current())
    root = home.Home.find(invocation.home).root
    sys.stdout.write(systemd_unit.unit(program=chosen.absolute(), home=root, user=user))
