"""Generated command lines: every command, with values that its parameters do not expect.

The types come from the parser. One parameter at a time gets an unusual value while the required ones have
plausible values; then random combinations follow, from a seed. `failures` runs them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from muster.cli import command, main
from muster.core import errors
from tests.cli import driver

BUG = errors.InvariantViolation.exit_code
PATIENCE_S = 3.0  # then a command that serves, or waits, is interrupted
#: A command that is known to wait is interrupted sooner, and later one of several of its lines is tried.
PATIENCE_AGAIN_S, WAITED_MAX, WAITED_EVERY = 0.3, 10, 5
SERVES = {"run", "pipeline"}  # with a home they serve until they are interrupted, or start Spark

#: Not called: they start processes or a whole domain, whatever their arguments.
STARTS = {"demo", "up"}
CONNECTION = {"servers", "creds", "ca", "locator"}  # swept once, with one command
ODD = (
    *("", " ", "x", "-", "--", "-1", "0", "1.5", "nan", "1e309", "9" * 30, "-" + "9" * 30, "0x10", "٣"),
    *(
        "é\u202e☃\U0001f600",
        "a\nb",
        "a\tb",
        "\x1b[31m",
        "a" * 5_000,
        "\ud800",
        "a/b",
        "../x",
        "*",
        ">",
        "a.b",
    ),
    *(
        "=",
        "a=",
        "a=b",
        "a=1=2",
        "'",
        '"',
        "{",
        "{}",
        "[]",
        "null",
        "(",
        "a = 'b'",
        "a > ",
        "1970-01-01",
        "1h",
    ),
)
#: Plausible values of required parameters, by name; the others get "x".
PLAUSIBLE = {
    "expression": "name = 'x'",
    "policy": "alert AND level > 3",
    "topic": "orders/eu",
    "destination": "queue:orders",
    "event": "alert level=3",
    "receiver": "farm/x",
    "words": "restart",
    "shell": "bash",
}


def files(folder: Path) -> list[str]:
    """Files with unusual content, and paths that are no files."""
    contents = {
        "empty": b"",
        "binary": bytes(range(256)),
        "list.yaml": b"- 1\n- [2]\n",
        "text.yaml": b"just text",
        "number.json": b"17",
        "deep.json": b"[" * 5_000 + b"]" * 5_000,
        "unknown.yaml": b"resources:\n  - {name: 1, type: [], nonsense: {}}\n",
        "null.yaml": b"resources: null\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [*(str(folder / name) for name in contents), str(folder), str(folder / "missing"), "/dev/null"]


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that call it."""

    def visit(
        path: tuple[str, ...], visited: click.Command
    ) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        if isinstance(visited, click.Group):
            context = click.Context(visited)
            for name in visited.list_commands(context):
                inner = visited.get_command(context, name)
                assert inner is not None
                yield from visit((*path, name), inner)
        if not isinstance(visited, click.Group) or visited.invoke_without_command:
            yield path, visited

    for path, click_command in visit((), main.muster):
        if path and path[0] not in STARTS:
            yield path, click_command


def serving(paths: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {path for path in paths if SERVES & {path[0], " ".join(path)}}


def failures(
    path: tuple[str, ...], click_command: click.Command, home: Path, folder: Path, *, every: int, mixed: int
) -> list[str]:
    """The command lines that fail, with their messages; one of ``every`` line is tried."""
    failed = []
    waited = 0
    rng = random.Random(" ".join(path))
    for number, words in enumerate(lines(path, click_command, files(folder), rng, mixed)):
        if number > 1 and number % (every if waited < WAITED_MAX else every * WAITED_EVERY):
            continue
        try:
            patience_s = PATIENCE_AGAIN_S if waited else PATIENCE_S
            answer = driver.quick(*words, home=home, patience_s=patience_s)
        except BaseException as error:  # noqa: BLE001  (whatever escapes is a finding)
            failed.append(f"{words}: {type(error).__name__}: {error}")
            continue
        waited += answer.was_interrupted
        if answer.code == BUG or "Traceback" in answer.err:
            failed.append(f"{words}: {answer.code}: {answer.err[:300]}")
    return failed


def lines(
    path: tuple[str, ...], click_command: click.Command, paths: list[str], rng: random.Random, mixed: int
) -> Iterator[list[str]]:
    """Command lines of one command: single unusual values, then ``mixed`` random combinations."""
    parameters = [
        parameter
        for parameter in click_command.params
        if parameter.name not in (*command.COMMON_NAMES, *CONNECTION, "help")
    ]
    required = [parameter for parameter in parameters if parameter.required]
    yield [*path]
    yield [*path, *_words(required, {}, paths)]
    for parameter in parameters:
        for value in _values(parameter, paths, rng):
            chosen = required if parameter in required else [*required, parameter]
            yield [*path, *_words(chosen, {parameter.name or "": value}, paths)]
    for _ in range(mixed):
        selected = [parameter for parameter in parameters if parameter in required or rng.random() < 0.4]
        odd = {p.name or "": rng.choice(_values(p, paths, rng)) for p in selected if rng.random() < 0.5}
        yield [*path, *_words(selected, odd, paths)]


def _values(parameter: click.Parameter, paths: list[str], rng: random.Random) -> list[str]:
    if getattr(parameter, "is_flag", False):
        return [""]
    selected = [*ODD, *paths] if isinstance(parameter.type, click.Path) else list(ODD)
    if isinstance(parameter.type, click.Choice):
        selected += [str(choice) for choice in parameter.type.choices]
    rng.shuffle(selected)
    return selected


def _words(parameters: list[click.Parameter], odd: dict[str, str], paths: list[str]) -> list[str]:
    words: list[str] = []
    arguments: list[str] = []
    for parameter in parameters:
        name = parameter.name or ""
        if getattr(parameter, "is_flag", False):
            words.append(parameter.opts[0])
            continue
        value = odd.get(name, _plausible(parameter, paths))
        if isinstance(parameter, click.Argument):
            arguments += [value] * (parameter.nargs if parameter.nargs > 0 else 1)
        else:
            words += [parameter.opts[-1], value]
    return [*words, "--", *arguments] if arguments else words


def _plausible(parameter: click.Parameter, paths: list[str]) -> str:
    kind = parameter.type
    if isinstance(kind, click.Path):
        return paths[2]
    if isinstance(kind, click.Choice):
        return str(kind.choices[0])
    if isinstance(kind, command.DurationParam):
        return "1s"
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return "1"
    return PLAUSIBLE.get(parameter.name or "", "x")
