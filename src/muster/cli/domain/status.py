"""``muster status``: the state of a domain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, tables
from muster.client import location

if TYPE_CHECKING:
    from muster.app import home
    from muster.core.settings import bus as bus_settings

_TABLES = {
    "brokers": ("broker", ("name", "state", "url", "connections", "restarts", "pid?", "problem")),
    "machines": ("machine", ("name", "roles", "address", "broker?", "stores")),
    "components": ("component", ("name", "state", "reason")),
    "budgets": ("budget", ("name", "used_bytes", "limit_bytes", "full_percent", "when_full")),
    "pages": ("health pages of", ("process", "url", "pid")),
    "certificates": ("certificate", ("name", "days_left", "due")),
}


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster status", ""),
        ("muster status -o json | jq -r '.brokers[].url'", ""),
        ("muster status -o json | jq -r '.servers_for_others[0]'", "for --server on another machine"),
        ("muster status --home ./.muster/demo", "the demo's domain"),
    ],
)
@command.pass_invocation
def status(invocation: command.Invocation) -> None:
    """Show the state of the domain and the location of its files.

    Exit code 0 if the domain runs and is ready, 5 otherwise.
    """
    from muster.app import home
    from muster.core import errors

    place = home.Home.find(invocation.home)
    settings = location.shared_settings(invocation.home)  # those of all services take a quarter of the time
    folder = home.DomainFolder(settings.domain.folder)
    pid, running = folder.holder(), folder.running()
    facts: dict[str, Any] = {
        "domain": settings.domain.name,
        "state": "stopped" if pid is None else "starting",
        "pid": pid,
        "home": str(place.root),
        "settings": str(place.settings_file),
        "keys": str(settings.keys_folder),
        "data": str(folder.root),
        "logs": str(folder.logs),
    }
    lists: dict[str, Any] = {}
    if running is not None:
        facts |= {
            "since": tables.local(running.started_at_s),
            "version": running.version,
            **urls(settings.bus, running),
            "health": running.health_url,
            "dashboard": running.web_url,
        }
        lists = command.run(fetch(running.health_url)) if running.health_url else {}
        facts["state"] = lists.pop("state", "running")
        facts["ready"] = lists.pop("ready", None)
    _print(invocation, facts, lists)
    if facts["state"] != "running" or facts.get("ready") is False:
        raise click.exceptions.Exit(errors.Unavailable.exit_code)


def urls(bus: bus_settings.BusSettings, running: home.RunningDomain) -> dict[str, Any]:
    """The brokers for this machine and for others, and the locator. The domain may listen on all addresses:
    0.0.0.0 is none that a client can use."""
    from muster.app.brokers import addresses
    from muster.core.net import hosts

    def for_others(*local: str) -> list[str]:
        reachable = addresses.reachable_urls(bus, local)
        return [url for url in reachable if not hosts.is_loopback(hosts.host_of_url(url, "server")[0])]

    locator = running.locator_url
    return {
        "servers": list(running.servers),
        "servers_for_others": [*for_others(*running.own_servers), *running.remote_servers],
        "locator": next(iter(for_others(locator)), locator) if locator else None,
    }


async def fetch(url: str) -> dict[str, Any]:
    """The status page of the domain; the state is ``unresponsive`` if it does not respond."""
    from muster.bus.http import client
    from muster.core import errors

    try:
        page = (await client.get(f"{url}/status")).json()
    except errors.MusterError as error:
        return {"state": "unresponsive", "reason": error.message}
    assert isinstance(page, dict)
    return page


def _print(invocation: command.Invocation, facts: dict[str, Any], lists: dict[str, Any]) -> None:
    printer = invocation.printer
    if not printer.for_people:
        printer.facts({**facts, **lists})
        return
    printer.facts(facts)
    if lists.get("reason"):
        printer.note(lists["reason"])
    for budget in lists.get("budgets", ()):
        budget["full_percent"] = 100 * budget["used_ratio"]
    for name, (of, columns) in _TABLES.items():
        if lists.get(name):
            click.echo()
            printer.rows(lists[name], columns, of=of)
