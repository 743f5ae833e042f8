"""``muster backup``, ``restore`` and ``convert``: save a domain to a file, restore it, convert a home."""

from __future__ import annotations

from pathlib import Path

import click

from muster.cli import command
from muster.cli.domain import config
from muster.core import units


@click.command(
    cls=command.MusterCommand,
    acts=("backup", "{file}"),
    examples=[
        ("muster backup /safe/place/lab.tar.gz", "the domain may be running"),
        ("muster backup lab-$(date +%F).tar.gz -o json", "from a cron job"),
    ],
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@command.pass_invocation
def backup(invocation: command.Invocation, file: Path) -> None:
    """Write settings, keys, rules, streams and history to a file.

    The domain may run during the backup. The file contains the domain's private keys: protect it like the
    keys. Not included: logs, data of the resources on agents, and what settings place outside of the home,
    such as certificates, or a history or checkpoint in an object store. The command names the latter.
    """
    from muster.app import home
    from muster.app.operations import backup as operations_backup

    place = home.Home.find(invocation.home).expect()
    settings = config.load(invocation)
    with invocation.printer.progress(f"backing up {settings.domain.name}") as say:
        made = command.run(operations_backup.backup(settings, place, file.absolute(), progress=say))
    size = file.stat().st_size
    history = sum(name.startswith("pipeline/history/") for name in made.files)
    invocation.printer.done(
        {
            "file": str(file),
            "bytes": size,
            "streams": len(made.streams),
            "history_files": history,
            "elsewhere": made.elsewhere,
        },
        f"{file}: {units.rounded_size(size)}, {len(made.streams)} streams, "
        f"{history} files of the history"
        + "".join(
            f"\nnot included: the {kind} in {url}; keep a copy of its own"
            for kind, url in made.elsewhere.items()
        ),
    )


@click.command(
    cls=command.MusterCommand,
    acts=("restore", "{file}"),
    examples=[("muster restore /safe/place/lab.tar.gz --home ~/.muster", "the home must not exist")],
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@command.pass_invocation
def restore(invocation: command.Invocation, file: Path) -> None:
    """Create a home from a backup.

    The home must not exist. The file is checked completely first; after a failure no files are left.
    """
    from muster.app import home
    from muster.app.operations import backup as operations_backup

    place = home.Home.find(invocation.home)
    with invocation.printer.progress(f"restoring {place.root}") as say:
        made, settings = command.run(operations_backup.restore(file.absolute(), place, progress=say))
    invocation.printer.done(
        {
            "home": str(place.root),
            "domain": settings.domain.name,
            "streams": len(made.streams),
        },
        f"{place.root} was restored: domain {settings.domain.name}, {len(made.streams)} streams; "
        "start it with `muster up"
        + (f" --home {command.display_path(place.root)}`" if invocation.home else "`"),
    )


@click.command(
    cls=command.MusterCommand,
    acts=("convert", "home"),
    examples=[
        ("muster convert --home ~/.muster", "the domain must not run"),
        ("muster convert --from lab.tar.gz", "its database was on a server: take the records from a backup"),
    ],
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A backup of this home, made by 0.1.0: for a database on a server.",
)
@command.pass_invocation
def convert(invocation: command.Invocation, source: Path | None) -> None:
    """Convert a home of Muster 0.1.0.

    Its registry moves from the database to a stream, and [store] is removed from muster.toml. Make a backup
    with 0.1.0 first: it does not open a home that was converted. An interrupted conversion can be repeated.
    """
    from muster.app import home
    from muster.app.operations import backup as operations_backup

    place = home.Home.find(invocation.home)
    with invocation.printer.waiting(f"converting {place.root}"):
        records = command.run(operations_backup.convert(place, source=source))
    invocation.printer.done(
        {"home": str(place.root), "records": records},
        f"{place.root} was converted: {units.format_count(records, 'record')} of the registry",
    )
