"""Generates the reference pages of the ``muster`` command: an overview, and a page for each command."""

from __future__ import annotations

from collections.abc import Iterator

import click

from muster.cli import main
from muster.core import errors

_HEAD = """\
# The `muster` command

Terms are explained in the [glossary](../glossary.md).

- Results go to stdout, everything else to stderr. `-o json` and `-o yaml` carry more fields than tables show.
  Streams (`muster sub`) are printed as one JSON object per line, or one YAML document each. Errors are
  printed as `error: …`, followed by `hint: …` if there is a remedy; with `-o json`, as a JSON object.
- Texts for people, here and in the dashboard, round measured values: `6.3 GB` (powers of 1,000), `10.9 %`,
  `350 ms`, `42 s`, and two units from two minutes on: `3m10s`, `7h55m`. Settings and limits are exact
  (`64MiB` is 64 × 1,048,576 bytes), and so are all values in JSON and YAML.
- A command that prints nothing for a second shows its name and the time that has passed. Colours,
  spinners and progress bars appear only on a terminal, and not if `NO_COLOR` is set.
- The home is selected by `--home`, else `MUSTER_HOME`, else `./.muster` if it is a home, else `~/.muster`.
- The connection is selected by `--server` or `--locator`, else `--profile` or `MUSTER_PROFILE`, else
  `--home` or `MUSTER_HOME`, else the current profile (`muster profile use`), else the default home. `--creds`
  and `--ca` override the values of the selected source.
- Subcommands have the same names everywhere: `list`, or a plural (`queues`, `nodes`), prints a list; `show`,
  `get` and `describe` print one object; `find` selects by a predicate; `put` and `save` write; `delete` and
  `forget` remove; `watch` and `--follow` print changes until Ctrl-C; `start`, `stop` and `kill` control
  processes.
- Options have the same meaning everywhere: `--where PREDICATE` selects; `-n/--limit` is the maximum number of
  rows of a list and `-n/--count` the number of messages after which a stream ends; `--last DURATION`, or
  `--from` and `--until TIME`, is a part of the history; `--to FILE` writes a file; `--wait DURATION` waits
  for a result and `--timeout DURATION` gives up; `--lifetime DURATION` ends credentials, tokens and grants.
  Names come before the operation: `muster exec web-1 restart`. No command asks for a confirmation: `muster
  plan` and `muster diff` show what `muster apply` would do.
- `muster completion` prints a script for bash, zsh or fish, which completes commands, options and the names
  of the running domain.
- Every change is recorded in the activity log with its outcome: `muster activity`.
- The common options may be given before or after the command, or in the environment: `MUSTER_OUTPUT`,
  `MUSTER_HOME`, `MUSTER_PROFILE`, `MUSTER_DEBUG`.
"""

WIDTH = 100

MEANINGS = {
    0: "success",
    1: "another error",
    2: "invalid input: a retry will not help",
    3: "refused: permissions, limits or the current state forbid it",
    4: "not found, or already exists",
    5: "unavailable: a retry may help",
    6: "a dependency has to be installed or started first",
    70: "a bug in Muster",
    main.INTERRUPTED: "interrupted by Ctrl-C",
}


def page_of(name: str) -> str:
    return f"reference/cli/{name}.md"


def pages() -> dict[str, list[str]]:
    """The pages of commands, by section."""
    sections: dict[str, list[str]] = {}
    for name, entry in main.COMMANDS.items():
        sections.setdefault(entry.section, []).append(page_of(name))
    return sections


def walk(
    command: click.Command = main.muster, name: str = "muster", parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield a context for every command, after the context of its group."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, **command.context_settings
    )
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            subcommand = command.get_command(context, below)
            assert subcommand is not None
            yield from walk(subcommand, below, context)


def exit_codes() -> dict[int, list[type[errors.MusterError]]]:
    """The exit codes of the error classes."""
    codes: dict[int, list[type[errors.MusterError]]] = {}
    waiting: list[type[errors.MusterError]] = [errors.MusterError]
    while waiting:
        kind = waiting.pop(0)
        if kind.__module__ == errors.__name__:
            codes.setdefault(kind.exit_code, []).append(kind)
            waiting += kind.__subclasses__()
    return codes


def render_overview() -> str:
    lines = [_HEAD, "## Exit codes", "", "| code | meaning | errors (`code` in JSON) |", "|---|---|---|"]
    codes = {0: [], **exit_codes(), main.INTERRUPTED: []}
    for code, kinds in sorted(codes.items()):
        names = ", ".join(dict.fromkeys(f"`{kind.code}`" for kind in kinds))  # some share a code
        lines.append(f"| {code} | {MEANINGS[code]} | {names} |")
    section = ""
    for name, entry in main.COMMANDS.items():
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", "", "| command | purpose |", "|---|---|"]
        lines.append(f"| [`muster {name}`](cli/{name}.md) | {entry.summary} |")
    return "\n".join([*lines, ""])


def render_command(name: str) -> str:
    """A page with a command and all below it."""
    parent = next(walk())
    command = main.muster.get_command(parent, name)
    assert command is not None
    lines: list[str] = []
    for context in walk(command, name, parent):
        heading = "##" if lines else "#"
        lines += [f"{heading} `{context.command_path}`", "", "```text", context.get_help(), "```", ""]
    return "\n".join(lines)
