"""``muster up`` and ``muster down``: start and stop a domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from muster.cli import command
from muster.cli.domain import config as config_

if TYPE_CHECKING:
    from muster.app import settings as app_settings

DETACH_TIMEOUT = "60s"
LOG_NAME = "domain.log"


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster up", "in the foreground; Ctrl-C stops it, a second Ctrl-C forces it"),
        ("muster up --detach && muster status", ""),
        ("muster up --set bus.port=0 --set log.level=debug", "override settings for this run"),
    ],
)
@click.option("-d", "--detach", is_flag=True, help="Run in the background; return when the domain is up.")
@command.duration("--timeout", DETACH_TIMEOUT, "Time limit of --detach.")
@click.option("--ready-fd", type=int, hidden=True)
@click.option(
    "--log-file", is_flag=True, help="Write the log to the domain's folder, within its disk budget."
)
@config_.set_option
@command.pass_invocation
def up(
    invocation: command.Invocation,
    detach: bool,
    timeout_s: float,
    ready_fd: int | None,
    log_file: bool,
    overrides: tuple[str, ...],
) -> None:
    """Start the domain of a home.

    Runs in the foreground until Ctrl-C or SIGTERM; with --detach, in the background.
    """
    from muster.app import home

    settings = config_.load(invocation, overrides)
    folder = home.DomainFolder(settings.domain.folder)
    if not detach:
        _in_front(invocation, settings, ready_fd, log_file=log_file or ready_fd is not None)
        return
    from muster.app import process

    with folder.hold():
        pass  # fail early, with a clear error, if the domain is running
    arguments = ["--home", str(home.Home.find(invocation.home).root), "up"]
    arguments += [word for override in overrides for word in ("--set", override)]
    with invocation.printer.waiting(f"starting the domain {settings.domain.name}"):
        pid = process.detach(arguments, folder, timeout_s=timeout_s)
    running = folder.running()
    servers = running.servers if running else ()
    invocation.printer.done(
        {"domain": settings.domain.name, "pid": pid, "servers": list(servers)},
        f"the domain {settings.domain.name} is up (pid {pid}): {', '.join(servers)}",
    )


def _in_front(
    invocation: command.Invocation, settings: app_settings.Settings, ready_fd: int | None, *, log_file: bool
) -> None:
    from muster.app import domain, log_files, process
    from muster.app import settings as app_settings

    running = domain.Domain(settings, parts=app_settings.components(settings))

    async def work() -> None:
        if ready_fd is not None:
            process.notify_ready(ready_fd)
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
    try:
        command.run(process.run(running, work, stopping=invocation.printer.stopping))
    finally:
        end_log()


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

    Requests a graceful shutdown and waits for it. Succeeds if the domain does not run.
    """
    from muster.app import home, process

    settings = config_.load(invocation)
    folder = home.DomainFolder(settings.domain.folder)
    with invocation.printer.waiting(f"stopping the domain {settings.domain.name}"):
        stopped = process.stop(folder, timeout_s=timeout_s, force=force)
    name = settings.domain.name
    invocation.printer.done(
        {"domain": name, "stopped": stopped},
        f"the domain {name} is stopped" if stopped else f"the domain {name} was not running",
    )
