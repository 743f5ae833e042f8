"""Commands named in texts and pages exist with their options; extras install what is documented."""

from __future__ import annotations

import re
import shlex
import tomllib

import click
import pytest

from muster.cli import main
from tests.docs import blocks

TEXTS = [
    path
    for path in (
        *blocks.ROOT.glob("*.md"),
        *blocks.ROOT.glob("docs/**/*.md"),
        *blocks.ROOT.glob("deploy/**/*.md"),
        *blocks.ROOT.glob("src/**/*.py"),
    )
    if path.name != "CHANGELOG.md"  # of commands that were
]
#: In a sentence, in a line of a block, or as a page of the dashboard shows it.
NAMED = re.compile(
    r'`(muster [a-z][^`\n]*)`|^\$ (muster [a-z].*)$|"code", "(muster [a-z][^"]*)"', re.MULTILINE
)
EVERYWHERE = {"-h", "--help", "-o", "--output", "--home", "--profile", "--debug"}


def commands(text: str) -> list[str]:
    lines = ["".join(match.groups("")) for match in NAMED.finditer(text)]
    each = [command for line in lines for command in line.split(" && ")]
    return [re.split(r" [|#>] ?| <<|\{option\}", command)[0] for command in each]


def fault(line: str) -> str:
    """What is wrong with a command; values do not matter."""
    try:
        words = shlex.split(line)[1:]
    except ValueError:  # it ends in the middle of a quotation, as a sentence may
        words = line.split()[1:]
    if "--" in words:  # another program's command follows
        del words[words.index("--") :]
    command: click.Command = main.muster
    while words and isinstance(command, click.Group) and not words[0].startswith(("-", "…")):
        if "|" in words[0]:  # one of several
            words[0] = words[0].partition("|")[0]
        inner = command.get_command(click.Context(command), words[0].rstrip("…"))
        if inner is None and command.invoke_without_command:
            break
        if inner is None:
            return f"no command {words[0]!r}"
        command, words = inner, words[1:]
    known = {
        name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
    } | EVERYWHERE
    options = [word.partition("=")[0] for word in words if re.match("--?[a-z]", word)]
    takes = any(isinstance(parameter, click.Argument) for parameter in command.params)
    if not takes and words and not options and not isinstance(command, click.Group) and words[0] != "…":
        return f"{words[0]!r} is one too many"
    return next((f"no option {option}" for option in options if option not in known), "")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("muster up --detach", ""),
        ("muster apply fleet.yaml", "'fleet.yaml' is one too many"),
        ("muster apply -f fleet.yaml", ""),
        ("muster agent token --name b", "no option --name"),
        ("muster broker dance", "no command 'dance'"),
    ],
)
def test_what_is_a_fault(line: str, wrong: str):
    assert fault(line) == wrong


def test_every_command_that_is_named_exists():
    named = {
        (path.relative_to(blocks.ROOT).as_posix(), command)
        for path in TEXTS
        for command in commands(path.read_text())
    }
    assert len(named) > 200
    assert sorted(f"{path}: {line}: {wrong}" for path, line in named if (wrong := fault(line))) == []


def test_the_table_of_extras_is_complete():
    table = (blocks.ROOT / "docs" / "guides" / "install.md").read_text()
    project = tomllib.loads((blocks.ROOT / "pyproject.toml").read_text())["project"]
    for extra, expected in project["optional-dependencies"].items():
        (row,) = re.findall(rf"^\| `{extra}` \| (.*)$", table, re.MULTILINE)
        for requirement in expected:
            name = re.split(r"[\[<>=]", requirement)[0]
            assert name.lower() in row.lower(), (extra, name)
