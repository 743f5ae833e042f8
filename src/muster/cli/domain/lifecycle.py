"""``muster up`` and ``muster down``: the life of a domain."""

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
        ("muster up", "in front; Ctrl-C drains and stops, a second one forces"),
        ("muster up --detach && muster status", ""),
        ("muster up --set bus.port=0 --set log.level=debug", "override settings for this run"),
    ],
)
@click.option("-d", "--detach", is_flag=True, help="Return when it is up, and leave it running.")
@command.duration("--timeout", DETACH_TIMEOUT, "How long to wait with --detach.")
@click.option("--ready-fd", type=int, hidden=True)
@click.option("--log-file", is_flag=True, help="Write the log into the domain's folder, within its budget.")
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

    Stays in front until Ctrl-C or SIGTERM, or with --detach returns when the domain is up.
    """
    from muster.app import home

    settings = config_.load(invocation, overrides)
    folder = home.DomainFolder(settings.domain.folder)
    if not detach:
        _in_front(invocation, settings, ready_fd, log_file=log_file or ready_fd is not None)
        return
    from muster.app import process

    with folder.hold():
        pass  # refuse at once, in this process's own words, if it is running
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
            "Ctrl-C stops it; `muster status` in another terminal shows more",
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
    return f"its dashboard: {url} (`muster web password` lets somebody in)\n" if url else ""


@click.command(
    cls=command.MusterCommand,
    acts=("down", "-"),
    examples=[("muster down", ""), ("muster down --force", "at once, without draining: as kill -9 would")],
)
@command.duration("--timeout", "30s", "How long to wait.")
@click.option("--force", is_flag=True, help="Kill it. Nothing acknowledged is lost.")
@command.pass_invocation
def down(invocation: command.Invocation, timeout_s: float, force: bool) -> None:
    """Stop the domain of a home.

    Asks the process to drain and stop, and waits until it has. Not an error if none runs.
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
