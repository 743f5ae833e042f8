"""``muster backup``, ``restore`` and ``convert``: save a domain to a file, restore it, convert a home."""

from __future__ import annotations

from pathlib import Path

import click

from muster.cli import command, connection, registry_calls
from muster.cli.domain import config
from muster.core import units


@click.command(
    cls=command.MusterCommand,
    acts=("backup", "{file}"),
    examples=[
        ("muster backup /safe/place/lab.tar.gz", "the domain may be running"),
        ("muster backup /safe/place --verify --keep 7", "another file in this folder; the newest 7 are kept"),
        ('muster backup /safe/place --schedule "30 2 * * *" --keep 7', "every night from now on, verified"),
    ],
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Restore it to a temporary folder, and compare.")
@click.option(
    "--keep",
    type=command.CountParam(1, 10_000),
    metavar="COUNT",
    help="In a folder: delete older backups of this domain, once this one is complete.",
)
@click.option("--schedule", metavar="CRON", help="Do this regularly, as the job `backup`.")
@command.pass_invocation
def backup(
    invocation: command.Invocation, file: Path, verify: bool, keep: int | None, schedule: str | None
) -> None:
    """Write settings, keys, rules, streams and history to a file.

    FILE may be a folder: the file in it is named after the domain and the time. The domain may run during the
    backup. The file contains the domain's private keys: protect it like the keys. Not included: logs, data of
    the resources on agents, and what settings place outside of the home, such as certificates, or a history
    or checkpoint in an object store. The command names the latter.
    """
    from muster.app import home
    from muster.app.operations import backup as operations_backup
    from muster.core import errors

    place = home.Home.find(invocation.home).expect()
    settings = config.load(invocation)
    folder = file if file.is_dir() else None
    if folder is None and (keep or schedule):
        raise errors.InvalidInput(f"{file} is not a folder", hint="--keep and --schedule need one")
    if folder is not None and schedule:
        made_job = operations_backup.job(settings, place, folder.absolute(), schedule, keep)
        registry_calls.call_registry(
            invocation, connection.ConnectionOptions(), lambda fleet: fleet.apply(made_job)
        )
        invocation.printer.done(
            {"job": operations_backup.JOB, "schedule": schedule, "folder": str(folder)},
            f"backups go to {folder}: `muster job list` shows when, `muster job history backup` the results",
        )
        return
    if folder is not None:
        file = operations_backup.dated(folder, settings.domain.name)
    with invocation.printer.progress(f"backing up {settings.domain.name}") as say:
        made = command.run(operations_backup.backup(settings, place, file.absolute(), progress=say))
    if verify:
        with invocation.printer.progress(f"verifying {file.name}") as say:
            try:
                command.run(operations_backup.verify(file.absolute(), progress=say))
            except BaseException:
                if folder is not None:
                    aside = operations_backup.set_aside(file, settings.domain.name)
                    invocation.printer.note(f"the backup could not be verified: it is {aside}")
                raise
    removed = []
    if folder is not None and keep:
        removed = operations_backup.remove_older(folder, settings.domain.name, keep)
    size = file.stat().st_size
    history = sum(name.startswith("pipeline/history/") for name in made.files)
    invocation.printer.done(
        {
            "file": str(file),
            "bytes": size,
            "streams": len(made.streams),
            "history_files": history,
            "elsewhere": made.elsewhere,
            "verified": verify,
            "removed": [path.name for path in removed],
        },
        f"{file}: {units.rounded_size(size)}, {len(made.streams)} streams, "
        f"{history} files of the history"
        + (", verified" if verify else "")
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
    acts=("recover", "home"),
    examples=[
        ("muster recover", "on the first machine, when the others are lost"),
        ("muster recover --from /safe/place/lab.tar.gz", "on another one, with a backup of the first"),
    ],
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A backup of the first machine: its keys and settings; the streams are those of this machine.",
)
@click.option("--force", is_flag=True, help="Although a broker of another machine replies.")
@command.pass_invocation
def recover(invocation: command.Invocation, source: Path | None, force: bool) -> None:
    """Continue a domain on this machine, when most of its machines are lost.

    From the replicas of the streams here, it becomes the first machine of the domain, alone; all others have
    to join again. The command says what is known to be lost. Do not use it while two of three machines work:
    they go on by themselves. The former storage or home stays beside the new one.
    """
    import msgspec

    from muster.app import home
    from muster.app.machines import recovery

    place = home.Home.find(invocation.home).expect()
    settings = config.load(invocation)
    with invocation.printer.progress(f"recovering {settings.domain.name}") as say:
        made = command.run(
            recovery.recover(
                place,
                settings,
                source=None if source is None else source.absolute(),
                force=force,
                progress=say,
            )
        )
    lines = [f"the domain {made.domain} continues here: {made.streams} streams, stored until {made.newest}"]
    lines += [f"lost: {name}: {what}" for name, what in made.lost.items()]
    lines += [] if made.lost else ["lost: nothing that was recorded; at most what was stored last"]
    lines += [f"to join again: {', '.join(made.removed)}"] if made.removed else []
    lines.append(f"the former data is in {made.kept}; start the domain with `muster up`")
    invocation.printer.done(msgspec.structs.asdict(made), "\n".join(lines))


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
