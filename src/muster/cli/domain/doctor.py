"""``muster doctor``: check a machine and its domain, and suggest remedies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.cli import command
from muster.cli.domain import config

if TYPE_CHECKING:
    from muster.app.operations import doctor as operations_doctor


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster doctor", "before the first start, or to diagnose a problem"),
        ("muster doctor --profile prod", "the connection to the domain of a profile"),
        ("muster doctor -o json | jq '.[] | select(.state != \"ok\")'", ""),
    ],
)
@command.pass_invocation
def doctor(invocation: command.Invocation) -> None:
    """Check this machine and its domain, and suggest remedies.

    Checks Python, the broker program, Java, the clock, the disk, ports, keys and certificates, the
    domain and its brokers, and changes nothing. Without a home it checks only the machine; with a profile,
    its credentials and brokers. Exit code 1 if a check fails.
    """
    from muster.app.operations import doctor as operations_doctor

    with invocation.printer.waiting("running checks"):
        results = command.run(operations_doctor.run_checks(_patient(invocation)))
    invocation.printer.rows(
        [dataclasses.asdict(result) for result in results],
        ("check", "state", "finding", "advice"),
        of="check",
    )
    if operations_doctor.worst(results) == operations_doctor.FAULT:
        raise click.exceptions.Exit(1)


def _patient(invocation: command.Invocation) -> operations_doctor.DoctorTarget:
    import os

    from muster.app import home, settings
    from muster.app.operations import doctor as operations_doctor
    from muster.client import profiles
    from muster.core.settings import loader

    name = invocation.profile or (None if invocation.home else profiles.current())
    chosen = profiles.load(name) if name is not None else profiles.Profile()
    place = home.Home.find(Path(chosen.home) if chosen.home else invocation.home)
    if name is not None and not chosen.home:
        creds = Path(chosen.creds) if chosen.creds else None
        way = operations_doctor.ConnectionRoute(
            chosen.servers, chosen.locator, creds, chosen.ca, chosen.proxy
        )
        return operations_doctor.DoctorTarget(place, settings.Settings(), None, way)
    if not place.settings_file.is_file():
        flags = {"domain.data_dir": str(place.root)}
        return operations_doctor.DoctorTarget(
            place, loader.load(settings.Settings, env=os.environ, flags=flags), None
        )
    return operations_doctor.doctor_target(place, config.load(command.Invocation(home=place.root)))
