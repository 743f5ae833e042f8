"""What every command shares: the common options, the help page, and the `Invocation` it is handed.

The common options stand on ``muster`` itself and on every command, so ``muster -o json status`` and
``muster status -o json`` mean the same; the one nearer to the end of the line wins.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from muster.cli import output as output_

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Invocation:
    """How this run of ``muster`` was called: what the common options said."""

    output: str = "table"  # one of output.FORMATS
    home: Path | None = None
    profile: str | None = None
    debug: bool = False
    typed: set[str] = field(default_factory=set)  # the common options that were typed

    @property
    def printer(self) -> output_.Printer:
        return output_.Printer(self.output)


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


def invocation_of(context: click.Context) -> Invocation:
    return context.ensure_object(Invocation)


def _remember(context: click.Context, option: click.Parameter, value: object) -> None:
    """Only ``muster`` itself looks at the environment: a command's own option counts when it was typed."""
    name = option.name or ""
    typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    invocation = context.ensure_object(Invocation)
    if value is not None and (typed or context.parent is None):
        setattr(invocation, name, value)
        if typed:
            invocation.typed.add(name)
    if "home" in invocation.typed and "profile" not in invocation.typed:
        invocation.profile = None  # what was typed counts more than MUSTER_PROFILE


class DurationParam(click.ParamType[float]):
    """Of any command: ``90``, ``90s``, ``1m30s``, ``7d``; in seconds."""

    name = "duration"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from muster.core import errors, units

        if isinstance(value, (int, float)):
            return float(value)
        try:
            found = units.parse_duration_s(str(value))
        except errors.InvalidInput as error:
            self.fail(error.message, param, ctx)
        if found < 0 or (found == 0 and not self._may_be_zero):
            self.fail(f"{value!r} is not above zero", param, ctx)
        return found


def duration(
    name: str,
    default: str | None,
    words: str,
    *,
    dest: str | None = None,
    may_be_zero: bool = False,
    required: bool = False,
) -> Callable[[F], F]:
    """An option such as ``--period 10s``, handed over in seconds as ``period_s``."""
    return click.option(
        name,
        dest or f"{name.removeprefix('--').replace('-', '_')}_s",
        type=DurationParam(may_be_zero=may_be_zero),
        default=default,
        show_default=default not in (None, "0"),
        required=required,
        help=words,
    )


COMMON_NAMES = ("output", "home", "profile", "debug")


def complete_profiles(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """For a shell that completes the name of a profile."""
    from muster.cli import profiles

    return [name for name in profiles.names() if name.startswith(begun)]


def _common_options() -> list[click.Parameter]:
    shared: dict[str, Any] = {"expose_value": False, "callback": _remember}
    return [
        click.Option(
            ["-o", "--output"],
            type=click.Choice(output_.FORMATS),
            envvar="MUSTER_OUTPUT",
            help="Form of the answer (default: table; streams: json is one object a line).",
            **shared,
        ),
        click.Option(
            ["--home"],
            type=click.Path(file_okay=False, path_type=Path),
            envvar="MUSTER_HOME",
            help="The domain's folder (default: ./.muster if there, else ~/.muster).",
            **shared,
        ),
        click.Option(
            ["--profile"],
            shell_complete=complete_profiles,
            envvar="MUSTER_PROFILE",
            metavar="NAME",
            help="Named connection settings to use.",
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
    """With a help page with the options of its own first, then the common ones, then examples."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[tuple[str, str]] = (),
        acts: tuple[str, ...] | None = None,  # see `muster.cli.audit_trail`
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.acts = acts
        self.params = [*self.params, *_common_options()]

    def invoke(self, ctx: click.Context) -> Any:
        if self.acts is None:
            return super().invoke(ctx)
        from muster.cli import audit_trail

        with audit_trail.audited(ctx, *self.acts):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):  # the usage line has it
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


def program() -> str:
    """What to type to call this command again: ``muster`` where the shell finds it, else where it is."""
    import shutil
    import sys

    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m muster"
    if shutil.which(called.name) is not None:
        return called.name
    return str(display_path(called.absolute()))


def display_path(path: Path) -> Path:
    """``path`` as a person here would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def run(work: Coroutine[Any, Any, T], *, fast: bool = False) -> T:
    """Run an async command to its end. ``fast``: on uvloop, where that is installed."""
    import asyncio
    import importlib
    import importlib.util
    import logging

    from muster.cli import interrupts

    async def heeded() -> T:
        with interrupts.interruptible():
            return await work

    # A command says itself what went wrong; a long-running one configures its log (`muster.app.log_files`).
    logging.getLogger("muster").addHandler(logging.NullHandler())
    factory = None
    if fast and importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(heeded())
    finally:
        work.close()  # if it was never begun
