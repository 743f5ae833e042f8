"""``muster run``: one component of a domain in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from muster.cli import command, connection
from muster.cli.domain import config as config_

if TYPE_CHECKING:
    from muster.app.components import component as component_
    from muster.app.supervisor import component_config, component_process

#: By component: what it is. A test compares the names with those of `muster.app.components.factories`.
COMPONENTS = {
    "amqp": "the gateway for AMQP 1.0 clients, such as JMS ones",
    "channel": "collects reports and forwards them in batches",
    "inform": "an information node",
    "message": "a dispatcher of queues and durable subscriptions, or its standby",
    "notify": "a notifier",
    "pipeline": "the driver of the Spark job, or its standby",
    "sensor": "reports the state of this machine",
    "soap": "the gateway for WS-Management, WS-Context and UDDI",
    "web": "the dashboard and the REST API",
}
#: Those that may run several times under one name: one acts and the others stand by, or they share the work.
TOGETHER = ("amqp", "message", "pipeline", "soap", "web")
FAST = ("amqp",)  # on uvloop, if it is installed


class RunCommand(command.MusterCommand):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Components"):
            formatter.write_dl(list(COMPONENTS.items()))
        super().format_options(ctx, formatter)


@click.command(
    cls=RunCommand,
    examples=[
        ("muster run amqp", "on port 5672, beside the domain of this home"),
        (
            "muster run channel --name edge --set channel.parents=c1,c2",
            "to c1, or c2",
        ),
        ("muster run web --set web.port=0", "on a free port, which is printed"),
        (
            "muster run sensor --server tls://broker:4222 --creds host-b.creds --ca ca.pem",
            "on a machine that has nothing else of the domain",
        ),
    ],
)
@click.argument("component", type=click.Choice(list(COMPONENTS)), metavar="COMPONENT")
@click.option(
    "--name", metavar="NAME", default="", help="Its identity (default: as in --creds or the settings)."
)
@config_.set_option
@connection.options
@click.option("--supervised", is_flag=True, hidden=True, help="Read the configuration from stdin.")
@command.pass_invocation
def run(
    invocation: command.Invocation,
    component: str,
    name: str,
    overrides: tuple[str, ...],
    to: connection.ConnectionOptions,
    supervised: bool,
) -> None:
    """Run one component of a domain until Ctrl-C.

    `muster up` runs those that the settings enable. Run others beside it, or on other machines: the settings
    are those of the home, if there is one, of the environment and of --set. The component connects to
    bus.servers, or to the domain that runs in the home. On a machine without a home, give --server and
    --creds.
    """
    from muster.app.supervisor import component_process
    from muster.core import errors

    if supervised:
        try:
            command.run(component_process.run_supervised(), fast=component in FAST)
        except errors.MusterError as error:
            click.echo(component_process.last_words(error), err=True)
            raise SystemExit(error.exit_code) from error
        return
    config = _config(invocation, component, name, overrides, to)

    def started(member: component_.Component, pages: str) -> None:
        facts = {"component": component, "name": config.name, **member.health().facts}
        where = getattr(member, "url", "")
        shown = component if config.name == component else f"{component} {config.name}"
        if pages:
            invocation.printer.note(f"health pages: {pages}")
        invocation.printer.done(facts, f"{shown} is up{f': {where}' if where else ''}; Ctrl-C ends it")

    command.run(_run(config, started), fast=component in FAST)


async def _run(config: component_config.ComponentConfig, started: component_process.Started) -> None:
    import sys

    from muster.app.supervisor import component_process
    from muster.core.telemetry import log

    end_log = log.configure(sys.stderr, level=config.settings.log.level, form=config.settings.log.format)
    try:
        await component_process.run_in_front(config, started)
    finally:
        end_log()


def _config(
    invocation: command.Invocation,
    component: str,
    name: str,
    overrides: tuple[str, ...],
    to: connection.ConnectionOptions,
) -> component_config.ComponentConfig:
    import msgspec

    from muster.app.supervisor import component_config
    from muster.trust import credentials
    from muster.trust.permissions import own_names

    resolved = config_.resolve(invocation, overrides, home_required=False)
    settings = resolved.settings
    if not resolved.sources.get("health.port", "--set").startswith(("--set", "environment")):
        # That of the file is the port of the domain's own process.
        settings = msgspec.structs.replace(settings, health=msgspec.structs.replace(settings.health, port=0))
    if to.names_server or to.creds or invocation.profile:
        to = connection.resolve(invocation, to)
    identity = name or (credentials.Credentials.load(to.creds).identity if to.creds else "")
    config = component_config.ComponentConfig(
        component=component,
        settings=settings,
        identity=identity,
        servers=to.servers,
        locator=to.locator or "",
        ca=str(to.ca or ""),
        creds=str(to.creds or ""),
    )
    if component not in TOGETHER and (not identity or identity in own_names.ROLES):
        command.run(_refuse_second(config))
    return config


async def _refuse_second(config: component_config.ComponentConfig) -> None:
    """Two channels of one name, for example, would both forward every report."""
    from muster.app import home
    from muster.cli.domain import status
    from muster.core import errors

    running = home.DomainFolder(config.settings.domain.folder).running()
    if config.servers or running is None or running.health_url is None:
        return
    page = await status.fetch(running.health_url)
    if any(part["name"] == config.component for part in page.get("components", ())):
        raise errors.Conflict(
            f"the domain runs the component {config.component!r} itself",
            hint="choose another name with --name",
        )
