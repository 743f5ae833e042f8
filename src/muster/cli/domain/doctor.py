"""``muster doctor``: what is not well here, and what to do about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.cli import command
from muster.cli.domain import config as config_

if TYPE_CHECKING:
    from muster.app.operations import doctor as operations_doctor


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster doctor", "before the first start, or when something is odd"),
        ("muster doctor --profile prod", "how one gets from here to a domain elsewhere"),
        ("muster doctor -o json | jq '.[] | select(.state != \"ok\")'", ""),
    ],
)
@command.pass_invocation
def doctor(invocation: command.Invocation) -> None:
    """Check this machine and its domain, and say what to do.

    Looks at Python, the broker's program, Java, the clock, the disk, ports, keys and certificates, the store,
    the domain and its brokers; changes nothing. Where there is no home yet, at the machine alone; with a
    profile, at its credentials and brokers. Exit code 1 if something does not work.
    """
    from muster.app.operations import doctor as operations_doctor

    with invocation.printer.waiting("looking"):
        found = command.run(operations_doctor.run_checks(_patient(invocation)))
    invocation.printer.rows(
        [dataclasses.asdict(one) for one in found], ("check", "state", "found", "advice"), of="check"
    )
    if operations_doctor.worst(found) == operations_doctor.FAULT:
        raise click.exceptions.Exit(1)


def _patient(invocation: command.Invocation) -> operations_doctor.DoctorTarget:
    import os

    from muster.app import home
    from muster.app import settings as app_settings
    from muster.app.operations import doctor as operations_doctor
    from muster.cli import profiles
    from muster.core.settings import loader

    name = invocation.profile or (None if invocation.home else profiles.current())
    chosen = profiles.load(name) if name is not None else profiles.Profile()
    place = home.Home.find(Path(chosen.home) if chosen.home else invocation.home)
    if name is not None and not chosen.home:
        creds = Path(chosen.creds) if chosen.creds else None
        way = operations_doctor.ConnectionRoute(chosen.servers, chosen.locator, creds, chosen.ca)
        return operations_doctor.DoctorTarget(place, app_settings.Settings(), None, way)
    if not place.settings_file.is_file():
        flags = {"domain.data_dir": str(place.root)}
        return operations_doctor.DoctorTarget(
            place, loader.load(app_settings.Settings, env=os.environ, flags=flags), None
        )
    return operations_doctor.doctor_target(place, config_.load(command.Invocation(home=place.root)))
