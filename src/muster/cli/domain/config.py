"""``muster config``: validate the settings and print them with the source of each value."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command

if TYPE_CHECKING:
    from muster.app import settings
    from muster.core.settings import loader

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one setting, as in --set bus.port=4222; may be repeated.",
)


def parse_overrides(overrides: Sequence[str]) -> dict[str, str]:
    pairs = [override.partition("=") for override in overrides]
    for (key, equals, _), override in zip(pairs, overrides, strict=True):
        if not (key and equals):
            raise click.BadParameter(f"{override!r} is not KEY=VALUE", param_hint="--set")
    return {key: value for key, _, value in pairs}


def resolve(
    invocation: command.Invocation,
    overrides: Sequence[str] = (),
    *,
    file: Path | None = None,
    home_required: bool = True,
) -> loader.ResolvedSettings[settings.Settings]:
    """The effective settings: of the home, the environment and ``--set``. ``home_required`` False: the folder
    of the home may have no settings; data are stored there."""
    import os

    from muster.app import home, settings
    from muster.core.settings import loader

    chosen_home, flags = home.Home.find(invocation.home), parse_overrides(overrides)
    place = file
    if file is None and (home_required or chosen_home.settings_file.is_file()):
        place = chosen_home.expect().settings_file
    elif file is None and "MUSTER_DOMAIN__DATA_DIR" not in os.environ:
        flags = {"domain.data_dir": str(chosen_home.root), **flags}
    return loader.resolve(settings.Settings, file=place, env=os.environ, flags=flags)


def load(invocation: command.Invocation, overrides: Sequence[str] = ()) -> settings.Settings:
    return resolve(invocation, overrides).settings


@click.group(cls=command.MusterGroup, examples=[("muster config print", "")])
def config() -> None:
    """Check and print settings."""


@config.command(
    examples=[
        ("muster config validate", "the settings of the home"),
        ("muster config validate ./muster.toml", ""),
    ]
)
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@set_option
@command.pass_invocation
def validate(invocation: command.Invocation, file: Path | None, overrides: tuple[str, ...]) -> None:
    """Validate the settings and list all errors.

    Reads muster.toml of the home or FILE, the environment and --set, and the files of alert rules, responses
    and reactions that the settings name.
    """
    from muster.app.operations import rule_files

    resolved = resolve(invocation, overrides, file=file)
    files = rule_files.check(resolved.settings)
    count = len(resolved.sources)
    sentence = f"valid: {count} {'setting is' if count == 1 else 'settings are'} changed from the default"
    invocation.printer.done(
        {"valid": True, "set": dict(resolved.sources), "files": files},
        "\n".join((sentence, *(f"valid: {name}" for name in files))),
    )


@config.command(
    "print",
    examples=[
        ("muster config print", "as TOML, each line with its source"),
        ("muster config print -o json | jq .bus", ""),
    ],
)
@click.option("--changed", is_flag=True, help="Only settings that differ from the default.")
@set_option
@command.pass_invocation
def print_(invocation: command.Invocation, changed: bool, overrides: tuple[str, ...]) -> None:
    """Print the effective settings and their sources.

    The default format is TOML, which can be saved and used as muster.toml.
    """
    from muster.core.settings import loader
    from muster.core.settings import sections as settings_sections

    resolved = resolve(invocation, overrides)
    if changed and invocation.printer.for_people:
        rows = [
            {
                "key": field.key,
                "value": loader.render_value(resolved.settings, field.path),
                "source": source,
            }
            for field in settings_sections.fields(type(resolved.settings))
            if (source := resolved.sources.get(field.key))
        ]
        invocation.printer.rows(rows, ("key", "value", "source"), empty="all settings have their defaults")
        return
    if invocation.printer.for_people:
        sys.stdout.write(loader.to_toml(resolved.settings, resolved.sources))
        return
    tree: dict[str, Any] = {}
    for field in settings_sections.fields(type(resolved.settings)):
        if changed and field.key not in resolved.sources:
            continue
        *sections, name = field.path
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = loader.render_value(resolved.settings, field.path)
    invocation.printer.facts(tree)
