"""``muster doctor``: what is not well here, and what to do about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.cli import base
from muster.cli import config as config_

if TYPE_CHECKING:
    from muster.app import checkup


@click.command(
    cls=base.Command,
    examples=[
        ("muster doctor", "before the first start, or when something is odd"),
        ("muster doctor --profile prod", "how one gets from here to a domain elsewhere"),
        ("muster doctor -o json | jq '.[] | select(.state != \"ok\")'", ""),
    ],
)
@base.pass_invocation
def doctor(invocation: base.Invocation) -> None:
    """Check this machine and its domain, and say what to do.

    Looks at Python, the broker's program, Java, the clock, the disk, ports, keys and certificates, the store,
    the domain and its brokers; changes nothing. Where there is no home yet, at the machine alone; with a
    profile, at its credentials and brokers. Exit code 1 if something does not work.
    """
    from muster.app import checkup

    with invocation.printer.waiting("looking"):
        found = base.run(checkup.examine(_patient(invocation)))
    invocation.printer.rows(
        [dataclasses.asdict(one) for one in found], ("check", "state", "found", "advice"), of="check"
    )
    if checkup.worst(found) == checkup.FAULT:
        raise click.exceptions.Exit(1)


def _patient(invocation: base.Invocation) -> checkup.Patient:
    import os

    from muster.app import catalogue, checkup, home
    from muster.cli import profiles
    from muster.core import settings

    name = invocation.profile or (None if invocation.home else profiles.current())
    chosen = profiles.load(name) if name is not None else profiles.Profile()
    place = home.Home.find(Path(chosen.home) if chosen.home else invocation.home)
    if name is not None and not chosen.home:
        creds = Path(chosen.creds) if chosen.creds else None
        way = checkup.Way(chosen.servers, chosen.locator, creds, chosen.ca)
        return checkup.Patient(place, catalogue.Settings(), None, way)
    if not place.settings_file.is_file():
        flags = {"domain.data_dir": str(place.root)}
        return checkup.Patient(place, settings.load(catalogue.Settings, env=os.environ, flags=flags), None)
    return checkup.patient(place, config_.load(base.Invocation(home=place.root)))
