"""The ``muster`` command: the table of commands, and the one place where errors become words and exit codes.

A command is one small file in this folder that is named in `COMMANDS`; it is imported only when it is called
(or completed), which keeps ``muster --help`` quick.  The summaries stand here so that the help page needs no
import either; a test compares them with what the commands say of themselves.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
from typing import Any, NamedTuple, NoReturn, cast

import click

from muster.cli import command as cli_command
from muster.cli import extras, interrupts, output
from muster.core import errors

INTERRUPTED = 130
COMPLETION_VARIABLE = "_MUSTER_COMPLETE"


class CommandEntry(NamedTuple):
    module: str  # in muster.cli; the command is its attribute of the command's own name
    section: str
    summary: str


COMMANDS: dict[str, CommandEntry] = {
    "demo": CommandEntry("start.demo", "Start here", "Start a domain on this machine and show it at work."),
    "init": CommandEntry("start.init", "Start here", "Make a home: identities, certificates and settings."),
    "up": CommandEntry("domain.lifecycle", "A domain", "Start the domain of a home."),
    "down": CommandEntry("domain.lifecycle", "A domain", "Stop the domain of a home."),
    "status": CommandEntry(
        "domain.status", "A domain", "Say what runs, how it is, and where its things are."
    ),
    "web": CommandEntry("domain.web", "A domain", "Serve the dashboard and REST, and say who may log in."),
    "broker": CommandEntry("domain.broker", "A domain", "Start, link, unlink and list brokers."),
    "creds": CommandEntry("domain.creds", "A domain", "Issue, revoke and show credentials."),
    "config": CommandEntry("domain.config", "A domain", "Check and print settings."),
    "backup": CommandEntry("domain.backup", "A domain", "Write settings, keys, store and streams to a file."),
    "restore": CommandEntry("domain.backup", "A domain", "Make a home from a backup."),
    "audit": CommandEntry(
        "domain.audit", "A domain", "Say who did what, when, by which door, and what became of it."
    ),
    "doctor": CommandEntry(
        "domain.doctor", "A domain", "Check this machine and its domain, and say what to do."
    ),
    "pub": CommandEntry("messages.pubsub", "Messages", "Publish a message to a topic."),
    "sub": CommandEntry("messages.pubsub", "Messages", "Print the messages of a topic as they come."),
    "request": CommandEntry("messages.pubsub", "Messages", "Ask a topic and print the answer."),
    "message": CommandEntry(
        "messages.jms", "Messages", "Send, receive and browse JMS messages; see to queues."
    ),
    "gateway": CommandEntry("messages.gateway", "Messages", "Let clients in that speak other protocols."),
    "inform": CommandEntry(
        "contexts.inform", "Contexts", "Put, get, find and watch contexts; see where they are."
    ),
    "apply": CommandEntry(
        "resources.desired_state", "Management", "Make what a manifest says be so, and keep it so."
    ),
    "plan": CommandEntry(
        "resources.desired_state", "Management", "Say what an apply would do, and do nothing."
    ),
    "diff": CommandEntry(
        "resources.desired_state", "Management", "Say field by field what an apply would change."
    ),
    "delete": CommandEntry(
        "resources.desired_state",
        "Management",
        "Take resources down and forget them, those that depend on others first.",
    ),
    "drain": CommandEntry(
        "resources.desired_state", "Management", "Let a resource, or all of an agent's, finish and stop."
    ),
    "rollout": CommandEntry(
        "resources.desired_state", "Management", "Do the same to many resources, some at a time."
    ),
    "get": CommandEntry("resources.live_state", "Management", "List resources and how they are."),
    "describe": CommandEntry(
        "resources.live_state", "Management", "Tell all there is to tell of one resource."
    ),
    "targets": CommandEntry(
        "resources.live_state", "Management", "List the resources that a predicate selects, and do nothing."
    ),
    "watch": CommandEntry(
        "resources.live_state", "Management", "Print each change of a resource's state as it comes."
    ),
    "logs": CommandEntry("resources.live_state", "Management", "Print the end of what a resource wrote."),
    "exec": CommandEntry(
        "resources.live_state", "Management", "Have an operation of a resource carried out."
    ),
    "events": CommandEntry("resources.live_state", "Management", "List the latest decisions: the audit."),
    "secret": CommandEntry("resources.secret", "Management", "Keep secrets in the domain's store."),
    "agent": CommandEntry(
        "resources.agent", "Management", "Host resources on this machine, and let machines into a domain."
    ),
    "chaos": CommandEntry("resources.chaos", "Management", "Kill parts of a domain, for drills."),
    "sensor": CommandEntry("monitoring.sensor", "Monitoring", "Report this machine and the services on it."),
    "channel": CommandEntry(
        "monitoring.channel", "Monitoring", "Take reports, hold them, and pass them on as columns."
    ),
    "top": CommandEntry(
        "monitoring.top",
        "Monitoring",
        "Show the fleet live: groups, the busiest first, and those that are stale.",
    ),
    "report": CommandEntry(
        "monitoring.report", "Monitoring", "Print the report of the system, of a group or of a machine."
    ),
    "capacity": CommandEntry(
        "monitoring.capacity",
        "Monitoring",
        "Say what a fleet of this size needs, how old its reports are, and what limits it.",
    ),
    "simulate": CommandEntry("monitoring.simulate", "Monitoring", "Play virtual fleets onto the bus."),
    "pipeline": CommandEntry(
        "monitoring.pipeline", "Monitoring", "Run Spark over the fleet's reports, and see how it fares."
    ),
    "alert": CommandEntry("monitoring.alert", "Monitoring", "List, acknowledge and silence alerts."),
    "history": CommandEntry("monitoring.history", "Monitoring", "Search the history of reports and alerts."),
    "notify": CommandEntry(
        "notifications.notify", "Messages", "Send events to those they are meant for, and see who that is."
    ),
    "authority": CommandEntry(
        "notifications.authority", "Messages", "Grant restricted attributes, and take them back."
    ),
    "profile": CommandEntry("tool.profile", "This command", "Named connection settings."),
    "completion": CommandEntry("tool.completion", "This command", "Print the completion script of a shell."),
    "version": CommandEntry(
        "tool.version", "This command", "Print the versions of Muster and what it stands on."
    ),
}


class RootGroup(cli_command.MusterGroup):
    """Knows its commands by name and imports one when it is wanted."""

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
        ("muster demo", "see it alive in ten seconds"),
        ("muster init && muster up --detach", "a domain of your own"),
        ("muster status", ""),
    ],
)
@click.version_option(package_name="muster", message="%(prog)s %(version)s")
def muster() -> None:
    """A publish/subscribe control plane for fleets of services."""


def from_os_error(error: OSError) -> errors.MusterError:
    """What the operating system refused, in the words of our own tree."""
    if isinstance(error, TimeoutError):
        return errors.TimedOut(str(error) or "it took too long", hint="is the machine busy? Try again")
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
                what, hint="another process has the port: choose another in the settings"
            )
        case _:
            return errors.MusterError(what)


def _known(error: Exception) -> errors.MusterError | None:
    """The error in our own tree; None for one that only a bug explains."""
    if isinstance(error, errors.MusterError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error)
    if isinstance(error, ModuleNotFoundError):
        return extras.missing(error)
    return None


def _report(invocation: cli_command.Invocation, code: str, message: str, hint: str | None) -> None:
    if invocation.output == "json":
        sys.stderr.write(json.dumps({"error": {"code": code, "message": message, "hint": hint}}) + "\n")
        return
    bold, plain = ("\x1b[1;31m", "\x1b[0m") if output.supports_color(sys.stderr) else ("", "")
    sys.stderr.write(f"{bold}error:{plain} {message}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")


def call(arguments: list[str] | None = None, *, program: str = "muster") -> int:
    """Run one command line and return its exit code. Errors are told on stderr."""
    invocation = cli_command.Invocation()
    try:
        words = sys.argv[1:] if arguments is None else arguments
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
        sys.stderr.write("\n")  # below the ^C that the terminal shows
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (``muster sub … | head``): not a fault, and Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else program
        hint = f"see `{path} --help`"
        if invocation.debug:
            raise
        _report(invocation, errors.InvalidInput.code, error.format_message(), hint)
        return errors.InvalidInput.exit_code
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # wrapped while a class was being created
            return INTERRUPTED
        if invocation.debug:
            raise
        known = _known(error)
        if known is not None:
            message = known.message
            if isinstance(known, errors.ParseError):
                message += "\n" + "\n".join(f"    {line}" for line in known.pointer().splitlines())
            _report(invocation, known.code, message, known.hint)
            return known.exit_code
        broken = errors.InvariantViolation(f"{type(error).__name__}: {error}")
        _report(invocation, broken.code, broken.message, "this is a bug in Muster: run it again with --debug")
        return broken.exit_code


def main() -> NoReturn:
    if os.environ.get(COMPLETION_VARIABLE):  # a shell asks what could stand here
        muster.main(prog_name="muster", complete_var=COMPLETION_VARIABLE)
    ignored = interrupts.is_ignored()
    if not ignored:
        interrupts.listen()
    try:
        code = call()
    except KeyboardInterrupt:  # between two of its lines
        code = INTERRUPTED
    if not ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left needs no order
    sys.exit(code)
