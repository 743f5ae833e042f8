"""``muster doctor``: what is not well here, and what to do about it."""

from __future__ import annotations

import dataclasses

import click

from muster.cli import base
from muster.cli import config as config_


@click.command(
    cls=base.Command,
    examples=[
        ("muster doctor", "before the first start, or when something is odd"),
        ("muster doctor -o json | jq '.[] | select(.state != \"ok\")'", ""),
    ],
)
@base.pass_invocation
def doctor(invocation: base.Invocation) -> None:
    """Check this machine and its domain, and say what to do.

    Looks at Python, the broker's program, Java, the clock, the disk, ports, keys and certificates, the store,
    the domain and its brokers; changes nothing. Exit code 1 if something does not work.
    """
    from muster.app import checkup, home

    place = home.Home.find(invocation.home)
    settings = config_.load(invocation)
    with invocation.printer.waiting("looking"):
        found = base.run(checkup.examine(checkup.patient(place, settings)))
    invocation.printer.rows(
        [dataclasses.asdict(one) for one in found], ("check", "state", "found", "advice"), of="check"
    )
    if checkup.worst(found) == checkup.FAULT:
        raise click.exceptions.Exit(1)
