"""The reference page of the command, made from the command itself.

A test compares it with docs/reference/cli.md; ``REWRITE=1 pytest tests/cli`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from muster.cli import main
from muster.core import errors

_HEAD = """\
# The `muster` command

Made from the source; do not edit.

- Answers go to stdout, everything else to stderr. `-o json` and `-o yaml` carry everything a table shows and
  more; streams (`muster sub`) are one JSON object a line, or one YAML document each. Errors are
  `error: …` and, where something can be done, `hint: …`; with `-o json`, one JSON object.
- Colours and spinners appear only on a terminal, and not with `NO_COLOR`.
- A home is chosen by `--home`, else `MUSTER_HOME`, else `./.muster` if it is a home, else `~/.muster`.
- What to connect to is chosen by `--server` or `--locator`, else `--profile` or `MUSTER_PROFILE`, else
  `--home` or `MUSTER_HOME`, else the current profile (`muster profile use`), else the default home. `--creds`
  and `--ca` override what that brings.
- One word means the same in every part: `list`, or the things' own name (`queues`, `nodes`), lists; `show`,
  `get` and `describe` tell of one; `find` and `where` select by a predicate; `put` and `save` write, `delete`
  and `forget` remove; `watch`, and `--follow`, go on with each change; `start`, `stop` and `kill` are of
  processes.
- What changes something is written to the audit, done or refused: `muster audit`.
- The common options may stand before or after the command; the environment gives them too: `MUSTER_OUTPUT`,
  `MUSTER_HOME`, `MUSTER_PROFILE`, `MUSTER_DEBUG`.
"""

WIDTH = 100

MEANINGS = {
    0: "done",
    1: "something else went wrong",
    2: "what was asked is wrong: asking again will not help",
    3: "understood, and refused",
    4: "not there, or there already",
    5: "not now: trying again may help",
    6: "something has to be installed or started first",
    70: "a bug in Muster",
    main.INTERRUPTED: "interrupted by Ctrl-C",
}


def walk(
    command: click.Command = main.muster, name: str = "muster", parent: click.Context | None = None
) -> Iterator[click.Context]:
    """A context for every command there is, each below its group's."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, **command.context_settings
    )
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from walk(found, below, context)


def exit_codes() -> dict[int, list[type[errors.MusterError]]]:
    """The codes of the error tree, with the errors that have each."""
    found: dict[int, list[type[errors.MusterError]]] = {}
    waiting: list[type[errors.MusterError]] = [errors.MusterError]
    while waiting:
        kind = waiting.pop(0)
        if kind.__module__ == errors.__name__:
            found.setdefault(kind.exit_code, []).append(kind)
            waiting += kind.__subclasses__()
    return found


def render_page() -> str:
    lines = [_HEAD, "## Exit codes", "", "| code | meaning | errors (`code` in JSON) |", "|---|---|---|"]
    codes = {0: [], **exit_codes(), main.INTERRUPTED: []}
    for code, kinds in sorted(codes.items()):
        names = ", ".join(dict.fromkeys(f"`{kind.code}`" for kind in kinds))  # some share a code
        lines.append(f"| {code} | {MEANINGS[code]} | {names} |")
    lines.append("")
    for context in walk():
        lines += [f"## `{context.command_path}`", "", "```text", context.get_help(), "```", ""]
    return "\n".join(lines)
