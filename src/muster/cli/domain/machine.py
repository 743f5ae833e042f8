"""``muster machine``, ``muster join`` and ``muster leave``: the machines of a domain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.app.machines import roles as machine_roles
from muster.cli import command, connection, live_names, registry_calls, tables

if TYPE_CHECKING:
    from muster.app import enrolment, home
    from muster.app.machines import join_client, membership

COLUMNS = ("name", "state", "version", "roles", "address", "broker?", "stores", "problem?", "since")
PATH_SHOWN = 100  # characters
LIST_S = 8.0  # for the reply of the machine that signs accounts


@click.group(cls=command.MusterGroup, examples=[("muster machine list", "")])
def machine() -> None:
    """Admit, list and remove the machines of a domain."""


@machine.command(
    examples=[
        ("muster machine token > t", "for one machine, within an hour; `muster join t` there uses it"),
        ("muster machine token --roles agent,information-node > t", ""),
        (
            "muster machine token rack7 --approval --lifetime 24h > t",
            "to be approved",
        ),
    ],
)
@click.argument("name", required=False, default="")
@click.option(
    "--roles",
    default=",".join(machine_roles.USUAL),
    show_default=True,
    metavar="ROLE,…",
    help=f"What the machine runs: of {', '.join(machine_roles.ALL)}.",
)
@click.option("--approval", is_flag=True, help="The machine has to be approved: `muster agent approve`.")
@command.duration("--lifetime", "1h", "Lifetime of the token.")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="URL",
    help="URL of a broker, as the machine reaches it; may be repeated (default: those of all machines).",
)
@connection.options
@command.pass_invocation
def token(
    invocation: command.Invocation,
    name: str,
    roles: str,
    approval: bool,
    lifetime_s: float,
    addresses: tuple[str, ...],
    to: connection.ConnectionOptions,
) -> None:
    """Create a token with which one machine joins the domain.

    A token is a secret, valid once. Without NAME, the machine chooses its name.
    """
    chosen = machine_roles.check([role for role in roles.split(",") if role])
    made = registry_calls.ask_domain(
        invocation,
        to,
        lambda domain: domain.token(
            name, approval=approval, lifetime_s=lifetime_s, servers=addresses, machine_roles=chosen
        ),
    )
    invocation.printer.done(made, made.token)


@machine.command("list", examples=[("muster machine list", ""), ("muster machine list -o json", "")])
@connection.options
@command.pass_invocation
def list_(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List the machines of the domain.

    While the machine that signs accounts does not reply, a machine shows the list of its last reply, and no
    states.
    """
    from muster.app.components import bootstrap_client
    from muster.core import errors

    try:
        known = connection.call(
            invocation,
            to,
            lambda bus: bootstrap_client.BootstrapClient(bus, timeout_s=LIST_S).machines(),
        )
        rows = [_row(machine) | _report(machine) for machine in known]
    except errors.Unavailable as error:
        last = _last_known(invocation, to)
        if not last:
            raise
        invocation.printer.note(f"{last[0].name}, which signs accounts, does not reply: {error.message}")
        rows = [_row(machine) | {"state": "unknown", "version": None} for machine in last]
    invocation.printer.rows(rows, COLUMNS, of="machine")


def _last_known(
    invocation: command.Invocation, to: connection.ConnectionOptions
) -> tuple[membership.Machine, ...]:
    """The machines that this one has heard of."""
    from muster.app import home
    from muster.app.machines import membership
    from muster.client import location

    here = home.Home.find(invocation.home)
    if to.names_server or invocation.profile or not here.settings_file.is_file():
        return ()
    listed = membership.load(location.shared_settings(invocation.home).domain.folder)
    return listed.machines if listed is not None else ()


def _report(row: membership.MachineRow) -> dict[str, object]:
    """What the machine has reported; one that is silent shows nothing that may be over."""
    if row.report is None or row.state == "silent":
        return {"state": row.state, "version": None, "program": None, "problem": None}
    problem = row.report.problem or row.report.refused_reason or None
    return {
        "state": row.state,
        "version": row.report.version,
        "program": row.report.program,
        "problem": problem,
    }


@machine.command(
    acts=("machine-upgrade", "{path}"),
    examples=[
        ("muster machine upgrade /opt/muster-2/bin/muster", "installed at this path on each machine"),
        ("muster machine upgrade /opt/muster-1/bin/muster", "the way back"),
    ],
)
@click.argument("path", metavar="PROGRAM", type=click.Path(dir_okay=False, path_type=Path))
@command.duration("--timeout", "180s", "Time limit for each machine.")
@connection.options
@command.pass_invocation
def upgrade(
    invocation: command.Invocation, path: Path, timeout_s: float, to: connection.ConnectionOptions
) -> None:
    """Run all machines with another installation of Muster, one after the other.

    PROGRAM is the path of its command `muster`, the same on each machine. A machine changes only while all
    others work and all replicas of streams are current. If it does not work with PROGRAM, all machines return
    to their former program, and the command fails. An interrupted command can be repeated. Processes of
    resources run on.
    """
    from muster.app.components import bootstrap_client
    from muster.app.machines import upgrade as upgrade_

    with invocation.printer.waiting("upgrading"):
        rows = connection.call(
            invocation,
            to,
            lambda bus: upgrade_.upgrade(
                bootstrap_client.BootstrapClient(bus, timeout_s=5.0),
                str(path),
                timeout_s=timeout_s,
                say=invocation.printer.note,
            ),
        )
    invocation.printer.done(
        {"machines": [_row(row) | _report(row) for row in rows]}, f"{len(rows)} machines run {path}"
    )


def _row(known: membership.Machine) -> dict[str, object]:
    return {
        "name": known.name,
        "roles": ", ".join(known.roles),
        "address": known.address,
        "broker": known.broker or None,
        "stores": known.stores,
        "since": tables.local(known.since_s),
    }


@machine.command(
    acts=("machine-remove", "{name}"),
    examples=[("muster machine remove c", "it is lost: its credentials end, and its data moves to others")],
)
@click.argument("name", shell_complete=live_names.JOINED)
@connection.options
@command.pass_invocation
def remove(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    """Remove a machine that is lost. Another one can join under its name.

    All its credentials are revoked. Replicas of streams that it had are created again on other machines; with
    fewer than three, when the next one joins.
    """
    removed = registry_calls.ask_domain(invocation, to, lambda domain: domain.remove_machine(name))
    invocation.printer.done(_row(removed), f"{name} is removed; its credentials are revoked")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster join t", "with the token in the file t"),
        ("muster join - < t", "from stdin"),
        ("muster join --detach", "from the variable MUSTER_JOIN_TOKEN; in the background"),
        ("muster join t --service", "start it under systemd, also after a reboot"),
        ("muster join t --name rack7 --address 10.0.0.7", ""),
    ],
)
@click.argument("token", required=False, default="")
@click.option(
    "--name", metavar="NAME", help="Name of this machine (default: as in the token, or its host name)."
)
@click.option(
    "--address",
    metavar="HOST",
    help="Name or address under which the other machines reach this one (default: that on the way to them).",
)
@click.option("--listen", metavar="HOST", help="Address on which its broker listens (default: as --address).")
@click.option("--zone", metavar="NAME", help="Machines that fail together have one zone (default: its name).")
@click.option(
    "--port", type=command.CountParam(1, 65535), default=4222, show_default=True, help="Port for clients."
)
@click.option(
    "--route-port",
    type=command.CountParam(1, 65535),
    default=6222,
    show_default=True,
    help="Port for brokers.",
)
@click.option("--proxy", metavar="URL", help="An HTTP proxy on the way to the domain.")
@click.option("-d", "--detach", is_flag=True, help="Run in the background; return when it is up.")
@click.option("--service", is_flag=True, help="Run as a service of systemd.")
@click.option("--no-start", is_flag=True, help="Only create the home.")
@click.pass_context
@command.pass_invocation
def join(
    invocation: command.Invocation,
    ctx: click.Context,
    token: str,
    name: str | None,
    address: str | None,
    listen: str | None,
    zone: str | None,
    port: int,
    route_port: int,
    proxy: str | None,
    detach: bool,
    service: bool,
    no_start: bool,
) -> None:
    """Join a domain with a token, and start what this machine runs.

    TOKEN is a file or '-'; without it, the variable MUSTER_JOIN_TOKEN has the token. All keys are made here,
    and only their public halves are sent. Afterwards, `muster up` and `muster down` start and stop the
    machine.
    """
    from muster.app import enrolment, home
    from muster.app.machines import join_client
    from muster.cli.domain import lifecycle
    from muster.core import errors

    place = home.Home.find(invocation.home)
    if place.settings_file.exists():
        raise errors.AlreadyExists(
            f"{place.root} is already a home", hint="start it with `muster up`, or choose another with --home"
        )
    parsed = enrolment.EnrolmentToken.parse(_text(token))
    choices = _choices(parsed, name, address, listen, zone, port, route_port)
    here = command.run(join_client.join(place, parsed, choices, waiting=invocation.printer.note, proxy=proxy))
    invocation.printer.note(f"this machine is {here.name}, with {', '.join(here.roles)}")
    if service:
        _install(place)
    if service or no_start:
        state = "runs as a service" if service else "can be started: `muster up`"
        invocation.printer.done(_row(here), f"{here.name} {state}")
        return
    ctx.invoke(
        lifecycle.up, detach=detach, parts=(), timeout_s=60.0, ready_fd=None, log_file=False, overrides=()
    )


def _text(token: str) -> str:
    import os

    from muster.core import errors

    if token:
        try:
            return registry_calls.read_text(Path(token))
        except OSError as error:
            shown = token if len(token) < PATH_SHOWN else "TOKEN"  # it may be the secret itself
            raise errors.NotFound(
                f"{shown}: {(error.strerror or 'no file').lower()}",
                hint="TOKEN is the name of a file; '-' reads the token itself from stdin",
            ) from error
    text = os.environ.get("MUSTER_JOIN_TOKEN", "")
    if not text:
        raise errors.InvalidInput(
            "no token", hint="name its file, '-' for stdin, or set the variable MUSTER_JOIN_TOKEN"
        )
    return text


def _choices(
    token: enrolment.EnrolmentToken,
    name: str | None,
    address: str | None,
    listen: str | None,
    zone: str | None,
    port: int,
    route_port: int,
) -> join_client.JoinChoices:
    import socket

    from muster.app.machines import join_client

    name = name or token.name or socket.gethostname().partition(".")[0]
    address = address or join_client.own_address(token.servers)
    return join_client.JoinChoices(
        name=name,
        address=address,
        listen=listen or address,
        zone=zone or name,
        port=port,
        route_port=route_port,
    )


def _install(place: home.Home) -> None:
    """A unit of systemd for this home: of the system for root, else of the user."""
    import os
    import subprocess

    from muster.app.machines import program
    from muster.app.operations import systemd_unit
    from muster.core import errors, files

    is_root = os.geteuid() == 0
    text = systemd_unit.unit(program=Path(program.current()), home=place.root)
    folder = Path("/etc/systemd/system") if is_root else files.expanded("~/.config/systemd/user")
    if is_root:
        text = text.replace("WantedBy=default.target", "WantedBy=multi-user.target")
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "muster.service", text.encode(), mode=files.PUBLIC)
    for words in (["daemon-reload"], ["enable", "--now", "muster"]):
        done = subprocess.run(
            ["systemctl", *([] if is_root else ["--user"]), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise errors.Refused(
                f"systemctl {' '.join(words)}: {done.stderr.strip()}",
                hint="the home is complete: start it with `muster up`",
            )


@click.command(
    cls=command.MusterCommand,
    examples=[("muster leave", "on the machine that leaves"), ("muster leave --force", "as one of three")],
)
@click.option("--force", is_flag=True, help="Also if streams have fewer replicas afterwards.")
@command.duration("--timeout", "60s", "Time limit for its resources to end or to move.")
@command.pass_invocation
def leave(invocation: command.Invocation, force: bool, timeout_s: float) -> None:
    """Drain this machine, remove it from the domain, and stop it.

    Resources that may run elsewhere move; the others end. All credentials of this machine are revoked. Its
    home stays as it is, without settings: `muster join` needs another one.
    """
    from muster.app import home, process
    from muster.app.components import bootstrap_client
    from muster.app.machines import membership
    from muster.cli.domain import config
    from muster.core import errors

    place = home.Home.find(invocation.home)
    settings = config.load(invocation)
    machines = membership.load(settings.domain.folder)
    if machines is None or machines.is_first:
        raise errors.Refused(
            "this machine did not join a domain: it signs accounts", hint="`muster down` stops the domain"
        )
    here = machines.here
    if here.stores and len(machines.storing) <= membership.REPLICAS and not force:
        raise errors.Refused(
            f"streams would have {membership.REPLICAS - 1} replicas, and stop when one more machine is lost",
            hint="let another machine join first, or leave with --force",
        )
    to = connection.ConnectionOptions()
    if "agent" in here.roles:
        _drain(invocation, to, here.name, timeout_s)
    try:
        connection.call(
            invocation,
            to,
            lambda bus: bootstrap_client.BootstrapClient(bus, timeout_s=LIST_S).remove_machine(
                here.name, leaves=True
            ),
        )
    except errors.Unavailable:  # its own credentials may have ended before the reply
        try:
            connection.call(invocation, to, lambda bus: bus.flush())
        except errors.Unauthorized:
            pass
        else:
            raise
    folder = home.DomainFolder(settings.domain.folder)
    with invocation.printer.waiting(f"stopping {here.name}"):
        process.stop(folder, timeout_s=timeout_s, force=False)
    place.settings_file.rename(place.settings_file.with_suffix(".left"))
    invocation.printer.done(_row(here), f"{here.name} has left the domain {settings.domain.name}")


def _drain(
    invocation: command.Invocation, to: connection.ConnectionOptions, agent: str, timeout_s: float
) -> None:
    """Drain the agent, and wait until nothing runs there."""
    import time

    from muster.core import errors

    registry_calls.call_registry(invocation, to, lambda fleet: fleet.drain(agent, "agent"))
    deadline = time.monotonic() + timeout_s
    where = f"agent = '{agent}'"
    with invocation.printer.waiting(f"draining {agent}"):
        while True:
            rows = registry_calls.call_registry(invocation, to, lambda fleet: fleet.get(where=where))
            running = [row.name for row in rows if row.state not in ("down", "completed", "failed")]
            if not running:
                return
            if time.monotonic() > deadline:
                raise errors.TimedOut(
                    f"{', '.join(running[:8])} did not end or move within {timeout_s:g} s",
                    hint="the machine is drained and still in the domain: repeat the command",
                )
            time.sleep(0.5)
