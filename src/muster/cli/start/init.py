"""``muster init``: create a home."""

from __future__ import annotations

import click

from muster.cli import command
from muster.cli.domain import config

ROUTE_PORT = 6222  # for the brokers of machines that join
_HEAD = """\
# Settings of this domain. `muster config print` shows all of them and where each comes from;
# the page "Settings" of the documentation explains each one.
"""


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster init", "a home in ~/.muster"),
        ("muster init --home ./.muster --name lab", "found by commands that run in this folder"),
        ("muster init --brokers 3 --port 4222", "three brokers on ports 4222 to 4224"),
        (
            "muster init --name fleet --host 10.0.0.1",
            "the first machine; `muster join` adds others",
        ),
    ],
)
@click.option("--name", metavar="NAME", default="local", show_default=True, help="The domain's name.")
@click.option(
    "--brokers", type=command.CountParam(1, 64), default=1, show_default=True, help="Number of brokers."
)
@click.option(
    "--port",
    type=command.CountParam(0, 65535),
    default=4222,
    show_default=True,
    help="Port of the first broker; 0: free ports, chosen at each start.",
)
@click.option(
    "--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address the brokers listen on."
)
@config.set_option
@command.pass_invocation
def init(
    invocation: command.Invocation, name: str, brokers: int, port: int, host: str, overrides: tuple[str, ...]
) -> None:
    """Create a home: identities, certificates and settings.

    A home is a folder with muster.toml and the domain's keys and data. Keep a copy of the keys in a safe
    place: they are the root of trust of the domain. `--set KEY=VALUE` writes further settings to the file.
    """
    from muster.app import certificates, home, identities, settings
    from muster.core import errors, files
    from muster.core.formats import toml
    from muster.core.settings import loader

    place = home.Home.find(invocation.home)
    if place.settings_file.exists():
        raise errors.AlreadyExists(
            f"{place.root} is already a home", hint="start it with `muster up`, or choose another with --home"
        )
    flags = {
        "domain.name": name,
        "domain.data_dir": ".",
        "bus.host": host,
        "bus.port": port,
        "bus.brokers": brokers,
        **config.parse_overrides(overrides),
    }
    given = loader.resolve(settings.Settings, flags=flags).settings  # typed, and checked
    bus = given.bus
    if bus.uses_tls and bus.port and not bus.servers and (bus.brokers, bus.layout) == (1, "mesh"):
        flags.setdefault("bus.route_port", str(ROUTE_PORT))  # machines can join
        given = loader.resolve(settings.Settings, flags=flags).settings
    values = {key: loader.value_of(given, tuple(key.split("."))) for key in flags}
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = place.settings_file.with_suffix(".draft")
    try:
        files.write(draft, (_HEAD + toml.sections(values)).encode(), mode=files.PUBLIC)
        made = loader.load(settings.Settings, file=draft)
        identities.open_or_create(made)
        certificates.ensure_authority(made)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    place.stamp()
    # Last: this file makes the folder a home, so an interrupted `init` can be repeated.
    draft.rename(place.settings_file)
    files.sync_folder(place.root)
    facts = {
        "home": str(place.root),
        "domain": name,
        "settings": str(place.settings_file),
        "keys": str(made.keys_folder),
        "certificates": str(certificates.folder(made)),
    }
    option = f" --home {invocation.home}" if invocation.home else ""
    invocation.printer.done(
        facts,
        f"{place.root} is the home of the domain {name}\n"
        f"  settings  {facts['settings']}\n"
        f"  keys      {facts['keys']} (keep a copy in a safe place)\n"
        f"next: {command.program()} up{option}",
    )
