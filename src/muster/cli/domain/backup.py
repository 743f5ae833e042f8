"""``muster backup`` and ``muster restore``: a domain in one file, and back."""

from __future__ import annotations

from pathlib import Path

import click

from muster.cli import command
from muster.cli.domain import config as config_


@click.command(
    cls=command.MusterCommand,
    acts=("backup", "{file}"),
    examples=[
        ("muster backup /safe/place/lab.tar.gz", "whether it runs or not"),
        ("muster backup lab-$(date +%F).tar.gz -o json", "for a timer"),
    ],
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@command.pass_invocation
def backup(invocation: command.Invocation, file: Path) -> None:
    """Write settings, keys, store and streams to a file.

    A running domain goes on meanwhile. The file holds the domain's private keys: whoever has it is the
    domain. Not in it: logs, the pipeline's history and checkpoint, and what agents host.
    """
    from muster.app import home
    from muster.app.operations import backup as operations_backup

    place = home.Home.find(invocation.home).expect()
    settings = config_.load(invocation)
    with invocation.printer.progress(f"backing up {settings.domain.name}") as say:
        made = command.run(operations_backup.backup(settings, place, file.absolute(), say=say))
    size = file.stat().st_size
    invocation.printer.done(
        {"file": str(file), "bytes": size, "records": made.records, "streams": len(made.streams)},
        f"{file}: {size:,} bytes, {made.records} records of the store, {len(made.streams)} streams",
    )


@click.command(
    cls=command.MusterCommand,
    acts=("restore", "{file}"),
    examples=[
        ("muster restore /safe/place/lab.tar.gz --home ~/.muster", "into a home that is not there yet")
    ],
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@command.pass_invocation
def restore(invocation: command.Invocation, file: Path) -> None:
    """Make a home from a backup.

    The home must not be there yet. All of it is checked first; if anything fails, nothing is left behind.
    """
    from muster.app import home
    from muster.app.operations import backup as operations_backup

    place = home.Home.find(invocation.home)
    with invocation.printer.progress(f"restoring {place.root}") as say:
        made, settings = command.run(operations_backup.restore(file.absolute(), place, say=say))
    invocation.printer.done(
        {
            "home": str(place.root),
            "domain": settings.domain.name,
            "records": made.records,
            "streams": len(made.streams),
        },
        f"{place.root} is the domain {settings.domain.name} with {made.records} records and "
        f"{len(made.streams)} streams; start it with `muster up"
        + (f" --home {command.display_path(place.root)}`" if invocation.home else "`"),
    )
