from __future__ import annotations

import click

from muster.cli import main
from muster.cli.domain import creds
from muster.core import errors
from muster.trust.permissions import roles
from tools.reference import cli as reference


def test_the_reference_has_every_command():
    pages = {name: reference.render_command(name) for name in main.COMMANDS}
    assert [name for name, page in pages.items() if not page.startswith(f"# `muster {name}`\n")] == []
    reference_text = "".join(pages.values())
    _, *paths = [context.command_path for context in reference.walk()]
    assert len(paths) > 100
    assert [path for path in paths if f"# `{path}`\n\n```text\nUsage: {path} " not in reference_text] == []


def test_help_fits_eighty_columns_and_no_summary_is_shortened(monkeypatch):
    monkeypatch.setattr(reference, "WIDTH", 80)
    for context in reference.walk():
        _, *lines = context.get_help().splitlines()  # the line of the usage may end with "..."
        assert not [line for line in lines if line.endswith("...")], context.command_path
        wide = [line for line in "\n".join(lines).partition("\nExamples:")[0].splitlines() if len(line) > 80]
        assert not wide, context.command_path


def test_every_option_is_explained():
    for context in reference.walk():
        options = [param for param in context.command.params if isinstance(param, click.Option)]
        unexplained = [option.name for option in options if not (option.help or option.hidden)]
        assert not unexplained, context.command_path


def test_every_error_of_the_tree_has_its_exit_code_on_the_page():
    kinds = {kind for group in reference.exit_codes().values() for kind in group}
    assert {errors.StaleEpoch, errors.TimedOut, errors.MissingDependency, errors.InvariantViolation} <= kinds
    assert 0 not in reference.exit_codes()


def test_the_roles_offered_are_those_there_are():
    assert set(creds.ROLES) == set(roles.Role) - {roles.Role.SYSTEM, roles.Role.JOINING}
