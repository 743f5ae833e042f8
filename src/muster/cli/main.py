"""The ``muster`` command: the table of commands, and the translation of errors to messages and exit codes.

A command is a module that `COMMANDS` names.  It is imported only when it is called or completed, which keeps
``muster --help`` quick.  The summaries are repeated here so that the help page imports no command; a test
compares them with the docstrings of the commands.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import os
import signal
import sys
from typing import Any, NamedTuple, NoReturn, cast

import click

from muster import __version__
from muster.cli import command as cli_command
from muster.cli import extras, interrupts, output
from muster.core import errors

INTERRUPTED = 130
COMPLETION_VARIABLE = "_MUSTER_COMPLETE"


class CommandEntry(NamedTuple):
    module: str  # in muster.cli; it has an attribute with the name of the command
    section: str
    summary: str


COMMANDS: dict[str, CommandEntry] = {
    "demo": CommandEntry("start.demo", "Getting started", "Start a demonstration domain on this machine."),
    "init": CommandEntry(
        "start.init", "Getting started", "Create a home: identities, certificates and settings."
    ),
    "up": CommandEntry("domain.lifecycle", "Domain", "Start the domain of a home."),
    "down": CommandEntry("domain.lifecycle", "Domain", "Stop the domain of a home."),
    "status": CommandEntry(
        "domain.status", "Domain", "Show the state of the domain and the location of its files."
    ),
    "run": CommandEntry("domain.run", "Domain", "Run one component of a domain until Ctrl-C."),
    "machine": CommandEntry("domain.machine", "Domain", "Admit, list and remove the machines of a domain."),
    "join": CommandEntry(
        "domain.machine", "Domain", "Join a domain with a token, and start what this machine runs."
    ),
    "leave": CommandEntry(
        "domain.machine", "Domain", "Drain this machine, remove it from the domain, and stop it."
    ),
    "web": CommandEntry("domain.web", "Domain", "Manage the logins and tokens of the dashboard."),
    "broker": CommandEntry("domain.broker", "Domain", "Start, link, unlink and list brokers."),
    "creds": CommandEntry("domain.creds", "Domain", "Issue, revoke and show credentials."),
    "config": CommandEntry("domain.config", "Domain", "Check and print settings."),
    "backup": CommandEntry(
        "domain.backup", "Domain", "Write settings, keys, rules, streams and history to a file."
    ),
    "restore": CommandEntry("domain.backup", "Domain", "Create a home from a backup."),
    "recover": CommandEntry(
        "domain.backup", "Domain", "Continue a domain on this machine, when most of its machines are lost."
    ),
    "convert": CommandEntry("domain.backup", "Domain", "Convert a home of Muster 0.1.0."),
    "activity": CommandEntry(
        "domain.activity", "Domain", "Show the activity log: who did what, when, and with which outcome."
    ),
    "doctor": CommandEntry(
        "domain.doctor", "Domain", "Check this machine and its domain, and suggest remedies."
    ),
    "pub": CommandEntry("messages.pubsub", "Messages", "Publish a message to a topic."),
    "sub": CommandEntry("messages.pubsub", "Messages", "Print the messages of a topic as they arrive."),
    "request": CommandEntry("messages.pubsub", "Messages", "Send a request to a topic and print the reply."),
    "message": CommandEntry(
        "messages.jms", "Messages", "Send, receive and browse JMS messages; administer queues."
    ),
    "gateway": CommandEntry("messages.gateway", "Messages", "Set the passwords of the clients of gateways."),
    "inform": CommandEntry(
        "contexts.inform", "Contexts", "Write, read, search and watch contexts; show their replicas."
    ),
    "apply": CommandEntry(
        "resources.desired_state",
        "Resources",
        "Apply a manifest and keep the resources in the declared state.",
    ),
    "plan": CommandEntry(
        "resources.desired_state", "Resources", "Show the steps of an apply without executing them."
    ),
    "diff": CommandEntry(
        "resources.desired_state", "Resources", "Show field by field what an apply would change."
    ),
    "delete": CommandEntry(
        "resources.desired_state",
        "Resources",
        "Stop resources and delete them, dependent ones first.",
    ),
    "drain": CommandEntry(
        "resources.desired_state", "Resources", "Drain a resource, or all resources of an agent."
    ),
    "rebalance": CommandEntry(
        "resources.desired_state",
        "Resources",
        "Show which resources fit better on other agents, and move them.",
    ),
    "rollout": CommandEntry(
        "resources.desired_state",
        "Resources",
        "Follow and control gradual changes: updates, and operations on many resources.",
    ),
    "get": CommandEntry("resources.live_state", "Resources", "List resources and their states."),
    "describe": CommandEntry(
        "resources.live_state", "Resources", "Show the details of a resource, or all of a machine."
    ),
    "targets": CommandEntry(
        "resources.live_state", "Resources", "List the resources that a predicate selects."
    ),
    "watch": CommandEntry(
        "resources.live_state", "Resources", "Print each change of a resource's state as it happens."
    ),
    "logs": CommandEntry("resources.live_state", "Resources", "Print and follow the logs of resources."),
    "exec": CommandEntry(
        "resources.live_state", "Resources", "Run an operation of resources, or a command inside one."
    ),
    "job": CommandEntry("resources.job", "Resources", "List and run jobs, and show how their runs ended."),
    "secret": CommandEntry("resources.secret", "Resources", "Manage the secrets in the domain's store."),
    "agent": CommandEntry(
        "resources.agent", "Resources", "Run the agent of this machine; enrol machines in a domain."
    ),
    "chaos": CommandEntry("resources.chaos", "Resources", "Kill processes of a domain, for failure drills."),
    "sensor": CommandEntry(
        "monitoring.sensor", "Monitoring", "Print what the sensor of this machine would report."
    ),
    "top": CommandEntry(
        "monitoring.top",
        "Monitoring",
        "Show the fleet live: groups sorted by load, and stale machines.",
    ),
    "report": CommandEntry(
        "monitoring.report",
        "Monitoring",
        "Print reports of the system, groups and machines, and analyses of their history.",
    ),
    "capacity": CommandEntry(
        "monitoring.capacity",
        "Monitoring",
        "Compute the channels and brokers a fleet needs, the age of its reports and the bottleneck.",
    ),
    "simulate": CommandEntry("monitoring.simulate", "Monitoring", "Publish the reports of simulated fleets."),
    "pipeline": CommandEntry(
        "monitoring.pipeline", "Monitoring", "Show the progress of the Spark pipeline, and stop it."
    ),
    "fleet": CommandEntry("monitoring.fleet", "Monitoring", "Remove machines from the fleet."),
    "alert": CommandEntry("monitoring.alert", "Monitoring", "List, acknowledge, resolve and silence alerts."),
    "history": CommandEntry(
        "monitoring.history", "Monitoring", "Search, export and delete the history of reports and alerts."
    ),
    "sql": CommandEntry(
        "monitoring.sql", "Monitoring", "Run a SELECT over the tables of the history and of the registry."
    ),
    "notify": CommandEntry(
        "notifications.notify",
        "Notifications",
        "Send events to receivers selected by state; query receivers.",
    ),
    "authority": CommandEntry(
        "notifications.authority", "Notifications", "Grant and revoke restricted attributes."
    ),
    "profile": CommandEntry("tool.profile", "Tool", "Manage named connection settings."),
    "schema": CommandEntry("tool.schema", "Tool", "Print the JSON Schema of a file format."),
    "completion": CommandEntry("tool.completion", "Tool", "Print the completion script for a shell."),
    "systemd": CommandEntry("tool.systemd", "Tool", "Print a systemd unit that runs the domain of a home."),
    "version": CommandEntry("tool.version", "Tool", "Print the versions of Muster and its dependencies."),
}


class RootGroup(cli_command.MusterGroup):
    """Imports a command when it is first used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = cast(dict[str, click.Command], COMMANDS)  # click looks here for the nearest spelling

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(importlib.import_module(f"muster.cli.{entry.module}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, entry.summary) for name, entry in COMMANDS.items() if entry.section == section],
                    col_max=14,
                )


@click.group(
    cls=RootGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=[
        ("muster demo", "a tour in ten seconds"),
        ("muster init && muster up --detach", "create and start a domain"),
        ("muster status", ""),
    ],
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def muster() -> None:
    """A publish/subscribe control plane for fleets of services."""


def from_os_error(error: OSError) -> errors.MusterError:
    """Translate an error of the operating system to a `MusterError`."""
    if isinstance(error, TimeoutError):
        return errors.TimedOut(
            str(error) or "the operation timed out", hint="the machine may be overloaded: try again"
        )
    what = (error.strerror or str(error) or type(error).__name__).lower()
    if error.filename:
        what = f"{error.filename}: {what}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return errors.LimitExceeded(what, hint="free some space, or choose another --home")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return errors.Forbidden(what, hint="change its permissions, or choose another --home")
        case errno.ENOENT:
            return errors.NotFound(what)
        case errno.EADDRINUSE:
            return errors.Unavailable(
                what, hint="another process uses the port: choose another one in the settings"
            )
        case _:
            return errors.MusterError(what)


def _known(error: Exception, command: str) -> errors.MusterError | None:
    """The error as a `MusterError`; None if only a bug explains it."""
    if isinstance(error, errors.MusterError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error)
    if isinstance(error, ModuleNotFoundError):
        return extras.missing(error, command)
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":  # a lone surrogate of the input
        shown = error.object[error.start : error.end].encode(errors="backslashreplace").decode()
        return errors.InvalidInput(f"{shown[:80]} is not a character: the input contains invalid text")
    return None


def _report(invocation: cli_command.Invocation, code: str, message: str, hint: str | None) -> None:
    with contextlib.suppress(OSError):  # stderr is full or closed; the exit code remains
        _write_error(invocation, code, message, hint)


def _write_error(invocation: cli_command.Invocation, code: str, message: str, hint: str | None) -> None:
    if invocation.output == "json":
        sys.stderr.write(json.dumps({"error": {"code": code, "message": message, "hint": hint}}) + "\n")
        return
    bold, plain = ("\x1b[1;31m", "\x1b[0m") if output.supports_color(sys.stderr) else ("", "")
    sys.stderr.write(f"{bold}error:{plain} {output.for_stream(message, sys.stderr)}\n")
    if hint:
        sys.stderr.write(f"hint: {output.for_stream(hint, sys.stderr)}\n")


def _with_suggestion(error: click.ClickException) -> str:
    """The message of an error; for a misspelt choice with the nearest one, as click does for commands."""
    message = error.format_message()
    given, refused, choices = error.message.partition(" is not one of ")
    if refused:
        import difflib  # 15 ms that only this error needs

        words = [word.strip(" .'") for word in choices.split(",")]
        for near in difflib.get_close_matches(given.strip("'"), words, n=1):
            return f"{message} Did you mean '{near}'?"
    return message


def _other_commands(error: click.ClickException) -> str:
    """For a command that does not exist: those about it, or if it resembles none, those that there are."""
    if not isinstance(error, click.exceptions.NoSuchCommand) or error.ctx is None:
        return ""
    group, near = error.ctx.command, error.possibilities or ()
    if not isinstance(group, RootGroup):
        return "" if near else f"its commands are {', '.join(cast(click.Group, group).commands)}; "
    stem = error.command_name.lower().removesuffix("s")
    if any(name.startswith(stem) for name in near):
        return ""
    about = [
        f"`muster {name}` ({entry.summary.removesuffix('.')})"
        for name, entry in COMMANDS.items()
        if len(stem) > 2 and any(word.startswith(stem) for word in entry.summary.lower().split())
    ]
    return f"did you mean {' or '.join(about[:3])}? " if about else ""


def _utf8(word: str) -> str:
    """An argument as UTF-8, whatever the encoding of the locale is."""
    return os.fsencode(word).decode("utf-8", "surrogateescape")


def _require_text(words: list[str]) -> None:
    """Refuse arguments and variables that are not UTF-8: they could be neither sent nor stored."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode(errors="backslashreplace").decode()
            raise click.UsageError(f"'{shown[:80]}' is not valid UTF-8 text") from None


def call(arguments: list[str] | None = None, *, program: str = "muster") -> int:
    """Run a command line and return its exit code. Errors are printed on stderr."""
    invocation = cli_command.Invocation()
    words = list(map(_utf8, sys.argv[1:])) if arguments is None else arguments
    try:
        variables = [value for name, value in os.environ.items() if name.startswith("MUSTER_")]
        _require_text([*words, *map(_utf8, variables)])
        with muster.make_context(program, words, obj=invocation) as context:
            muster.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as stop:
        stop.show()
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt, EOFError):
        with contextlib.suppress(OSError):
            sys.stderr.write("\n")  # below the ^C that the terminal shows
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (``muster sub … | head``). Python must not report that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else program
        if invocation.debug:
            raise
        hint = f"{_other_commands(error)}see `{path} --help`"
        _report(invocation, errors.InvalidInput.code, _with_suggestion(error), hint)
        return errors.InvalidInput.exit_code
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # wrapped while a class was being created
            return INTERRUPTED
        if invocation.debug:
            raise
        known = _known(error, next((word for word in words if word in extras.COMMANDS), ""))
        if known is not None:
            message = known.message
            if isinstance(known, errors.ParseError):
                message += "\n" + "\n".join(f"    {line}" for line in known.pointer().splitlines())
            _report(invocation, known.code, message, known.hint)
            return known.exit_code
        broken = errors.InvariantViolation(f"{type(error).__name__}: {error}")
        _report(invocation, broken.code, broken.message, "this is a bug in Muster: run it again with --debug")
        return broken.exit_code


def _discard_unwritten() -> None:
    """Drop what cannot be written (the disk is full): Python would report it at exit, with another code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> NoReturn:
    if os.environ.get(COMPLETION_VARIABLE):  # a shell requests completions
        importlib.import_module("muster.cli.tool.completion")  # registers our script for bash
        muster.main(prog_name="muster", complete_var=COMPLETION_VARIABLE)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it, as in ``muster get >&-``
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (until the end)
    ignored = interrupts.is_ignored()
    if not ignored:
        interrupts.listen()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an encoding that lacks a character must not stop a command
            stream.reconfigure(errors="backslashreplace")
    try:
        code = call()
    except KeyboardInterrupt:  # outside the try block of `call`
        code = INTERRUPTED
    if not ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to clean up
    _discard_unwritten()
    sys.exit(code)
