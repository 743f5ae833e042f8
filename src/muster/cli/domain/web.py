"""``muster web``: the dashboard and REST as a process of its own, and who may log in there."""

from __future__ import annotations

import sys

import click

from muster.cli import command, registry_calls
from muster.cli.domain import config as config_

ROLES = ("viewer", "operator", "admin")


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster web password", "make the administrator's password, and print it"),
        ("muster web serve --set web.port=8443", "without `muster up`'s own"),
    ],
)
def web() -> None:
    """Serve the dashboard and REST, and say who may log in.

    `muster up` serves them too, unless the setting web.enabled is false.
    """


@web.command(
    examples=[
        ("muster web serve", "until Ctrl-C; waits for the domain, and for its return"),
        ("muster web serve --set web.port=0", "on a free port, which it prints"),
    ]
)
@config_.set_option
@command.pass_invocation
def serve(invocation: command.Invocation, overrides: tuple[str, ...]) -> None:
    """Serve the dashboard and REST of the home's domain, until Ctrl-C."""
    import asyncio
    import signal

    import msgspec

    from muster.app import home, identities
    from muster.app.components import web as web_
    from muster.core.telemetry import log

    settings = config_.load(invocation, overrides)
    web_.check()
    log.configure(sys.stderr, level=settings.log.level, form="text")
    folder = home.DomainFolder(settings.domain.folder)

    async def run() -> None:
        from muster.app.supervisor import web_process

        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        with web_.listen(settings.web) as listener:
            url = web_.url_of(settings.web, listener)
            invocation.printer.done({"url": url}, f"serving {url}; Ctrl-C ends it")
            await web_process.serve_web(
                settings.web,
                listener=listener,
                domain=settings.domain.name,
                folder=folder,
                trust=await asyncio.to_thread(identities.open_keyring, settings),
                history=web_.history_of(settings, folder),
                stop=stop,
                health=msgspec.structs.replace(settings.health, port=0),
            )

    command.run(run())


@web.command(
    acts=("set-login", "{name}"),
    examples=[
        ("muster web password", "of `admin`: made up, and printed once"),
        ("echo 'a long secret' | muster web password ann --role operator", ""),
    ],
)
@click.argument("name", default="admin")
@click.option(
    "--role", type=click.Choice(ROLES), help="What NAME may do (default: admin for `admin`, else viewer)."
)
@click.option("--ask", is_flag=True, help="Ask for the password instead of making one up.")
@command.pass_invocation
def password(invocation: command.Invocation, name: str, role: str | None, ask: bool) -> None:
    """Let NAME log in at the dashboard and for REST.

    A password on stdin is taken; otherwise one is made up and printed.
    """
    from muster.app import identities
    from muster.app.components import web as web_

    given = ""
    if ask:
        given = click.prompt("password", hide_input=True, confirmation_prompt=True)
    elif not sys.stdin.isatty():
        given = sys.stdin.readline().rstrip("\n")
    chosen = role or ("admin" if name == web_.ADMINISTRATOR else "viewer")
    trust = identities.open_keyring(config_.load(invocation))
    made = web_.set_password(trust, name, role=chosen, password=given)
    facts = {"name": name, "role": chosen} | ({} if given else {"password": made})
    invocation.printer.done(
        facts, f"{name} can log in as {chosen}" + ("" if given else f" with the password {made}")
    )


@web.command(examples=[("muster web logins", "")])
@command.pass_invocation
def logins(invocation: command.Invocation) -> None:
    """List who may log in."""
    from muster.app import identities

    passwords = identities.open_keyring(config_.load(invocation)).passwords()
    found = [passwords.get(name) for name in passwords.names()]
    rows = [
        {
            "name": one.name,
            "role": "admin" if one.administers else one.role.value,
            "expires_at": one.expires_at,
            "expires": registry_calls.format_time(one.expires_at * 1000),
        }
        for one in found
    ]
    invocation.printer.rows(rows, ("name", "role", "expires"), empty="nobody can log in yet")


@web.command(acts=("remove-login", "{name}"), examples=[("muster web forget ann", "")])
@click.argument("name")
@command.pass_invocation
def forget(invocation: command.Invocation, name: str) -> None:
    """Let NAME log in no more; its sessions end within seconds."""
    from muster.app import identities

    identities.open_keyring(config_.load(invocation)).passwords().remove(name)
    invocation.printer.done({"name": name}, f"{name} can no longer log in")
