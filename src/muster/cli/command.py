"""What all commands share: the common options, the help page, and the `Invocation`.

``muster`` itself and every command accept the common options, so ``muster -o json status`` and
``muster status -o json`` are equivalent; the last occurrence wins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from muster.cli import output as output_
from muster.core import errors

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Invocation:
    """The values of the common options of this run."""

    output: str = "table"  # one of output.FORMATS
    home: Path | None = None
    profile: str | None = None
    debug: bool = False
    typed: set[str] = field(default_factory=set)  # the common options given on the command line

    @property
    def printer(self) -> output_.Printer:
        return output_.Printer(self.output)


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


def invocation_of(context: click.Context) -> Invocation:
    return context.ensure_object(Invocation)


def _remember(context: click.Context, option: click.Parameter, value: object) -> None:
    """Only ``muster`` itself reads the environment: a command's own option counts if it was given."""
    name = option.name or ""
    typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    invocation = context.ensure_object(Invocation)
    if value is not None and (typed or context.parent is None):
        setattr(invocation, name, value)
        if typed:
            invocation.typed.add(name)
    if "home" in invocation.typed and "profile" not in invocation.typed:
        invocation.profile = None  # --home takes precedence over MUSTER_PROFILE


class DurationParam(click.ParamType[float]):
    """A duration such as ``90``, ``90s``, ``1m30s`` or ``7d``, converted to seconds."""

    name = "duration"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from muster.core import errors, units

        if isinstance(value, (int, float)):
            return float(value)
        try:
            seconds = units.parse_duration_s(str(value))
        except errors.InvalidInput as error:
            self.fail(error.message, param, ctx)
        if seconds < 0 or (seconds == 0 and not self._may_be_zero):
            self.fail(f"{value!r} is not positive", param, ctx)
        return seconds


class CountParam(click.IntRange):
    """An integer between bounds; help pages show ``N`` and ``1 to 10,000`` instead of an inequality."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"

    def _describe_range(self) -> str:
        return f"{self.min:,} or more" if self.max is None else f"{self.min:,} to {self.max:,}"


class AmountParam(click.FloatRange):
    """A positive, finite number; help pages show ``more than 0`` instead of an inequality."""

    def __init__(self, at_most: float | None = None, *, at_least: float = 0.0) -> None:
        super().__init__(at_least, at_most, min_open=not at_least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        amount = float(super().convert(value, param, ctx))
        if not math.isfinite(amount):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return amount

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"

    def _describe_range(self) -> str:
        lower = f"{self.min:,} or more" if self.min else "more than 0"
        return lower if self.max is None else f"{lower}, at most {self.max:,}"


def duration(
    name: str,
    default: str | None,
    words: str,
    *,
    dest: str | None = None,
    may_be_zero: bool = False,
    required: bool = False,
) -> Callable[[F], F]:
    """An option such as ``--period 10s``; the command receives it in seconds as ``period_s``."""
    return click.option(
        name,
        dest or f"{name.removeprefix('--').replace('-', '_')}_s",
        type=DurationParam(may_be_zero=may_be_zero),
        default=default,
        show_default=default not in (None, "0"),
        required=required,
        help=words,
    )


def parse_value(text: str) -> Any:
    """The value of ``NAME=VALUE``: JSON, or otherwise text. A number that JSON writes in another way, such as
    the version 1.10, is text too.
    """
    import json

    def number(digits: str) -> float | str:
        value = float(digits)
        return value if repr(value) == digits else digits

    try:
        return json.loads(text, parse_float=number, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def assignments(texts: Iterable[str], option: str | None = None) -> dict[str, str]:
    """The values of ``NAME=VALUE`` arguments, each name once."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{text[:80]!r} is not NAME=VALUE", param_hint=option)
        if name in values:
            raise click.BadParameter(f"{name[:80]!r} is given twice", param_hint=option)
        values[name] = value
    return values


def limit(default: int, words: str, *, at_least: int = 1, at_most: int | None = None) -> Callable[[F], F]:
    """The option ``-n``, ``--limit`` of a command that prints rows."""
    return click.option(
        "-n",
        "--limit",
        type=CountParam(at_least, at_most),
        default=default,
        show_default=True,
        help=words,
    )


COMMON_NAMES = ("output", "home", "profile", "debug")


def complete_profiles(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Shell completion of profile names."""
    from muster.client import profiles

    return [name for name in profiles.names() if name.startswith(begun)]


def _common_options() -> list[click.Parameter]:
    shared: dict[str, Any] = {"expose_value": False, "callback": _remember}
    return [
        click.Option(
            ["-o", "--output"],
            type=click.Choice(output_.FORMATS),
            envvar="MUSTER_OUTPUT",
            help="Output format (default: table; json prints streams as one object per line).",
            **shared,
        ),
        click.Option(
            ["--home"],
            type=click.Path(file_okay=False, path_type=Path),
            envvar="MUSTER_HOME",
            help="Folder of the domain (default: ./.muster if it exists, else ~/.muster).",
            **shared,
        ),
        click.Option(
            ["--profile"],
            shell_complete=complete_profiles,
            envvar="MUSTER_PROFILE",
            metavar="NAME",
            help="Use these named connection settings.",
            **shared,
        ),
        click.Option(
            ["--debug"],
            is_flag=True,
            default=None,
            envvar="MUSTER_DEBUG",
            help="Show the traceback of an error.",
            **shared,
        ),
    ]


class MusterCommand(click.Command):
    """A command whose help page lists its own options, the common options and examples."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[tuple[str, str]] = (),
        acts: tuple[str, ...] | None = None,  # see `muster.cli.activity_log`
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.acts = acts
        self.params = [*self.params, *_common_options()]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with self._spinner(ctx):
                if self.acts is None:
                    return super().invoke(ctx)
                from muster.cli import activity_log

                with activity_log.recorded(ctx, *self.acts):
                    return super().invoke(ctx)
        except errors.NotFound as error:
            if error.hint is None:
                from muster.cli import live_names

                error.hint = live_names.similar_to(ctx, error.message)
            raise

    def _spinner(self, ctx: click.Context) -> contextlib.AbstractContextManager[None]:
        """On a terminal, a command that prints nothing for a while shows that it works."""
        import sys

        if isinstance(self, click.Group) or not invocation_of(ctx).printer.shows_progress(sys.stderr):
            return contextlib.nullcontext()
        from muster.cli import spinner

        return spinner.shown(ctx.command_path)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):  # the usage line shows it
                (common if param.name in COMMON_NAMES else own).append(record)
        for title, records in (("Options", own), ("Common options", common)):
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples:
                    formatter.write(f"  {line}\n" + (f"      {meaning}\n" if meaning else ""))


class MusterGroup(MusterCommand, click.Group):
    command_class = MusterCommand

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """With the whole summaries: click shortens them to a line."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, inner.get_short_help_str(limit=1000)) for name, inner in self.commands.items()]
            )


def empty_result(sentence: str, rows: Sized, predicate: str) -> str:
    """What a command prints if ``predicate`` selected no rows: the sentence, and a likely mistake."""
    if rows:
        return sentence
    from muster.predicates.analysis import quotation

    hint = quotation.unquoted_hint(predicate)
    return f"{sentence}; {hint}" if hint else sentence


def program() -> str:
    """How to call this program: ``muster`` if it is on the PATH, else its location."""
    import shutil
    import sys

    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m muster"
    if shutil.which(called.name) is not None:
        return called.name
    return str(display_path(called.absolute()))


def display_path(path: Path) -> Path:
    """``path``, relative to the current folder if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def run(work: Coroutine[Any, Any, T], *, fast: bool = False) -> T:
    """Run an async command. ``fast``: on uvloop, if it is installed."""
    import asyncio
    import importlib
    import importlib.util
    import logging

    from muster.cli import interrupts

    async def heeded() -> T:
        with interrupts.interruptible():
            return await work

    # Commands print their own errors; long-running ones configure a log (`muster.app.log_files`).
    logging.getLogger("muster").addHandler(logging.NullHandler())
    factory = None
    if fast and importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(heeded())
    finally:
        work.close()  # if it was never started
