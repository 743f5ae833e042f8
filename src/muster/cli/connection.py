"""Which bus a command talks to, and as whom: the options, and what they come to (`muster.cli.profiles`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.cli import command as cli_command
from muster.cli.domain import config as config_

if TYPE_CHECKING:
    from muster.bus import api
    from muster.cli import profiles
    from muster.core.telemetry import metrics

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ConnectionOptions:
    servers: tuple[str, ...] = ()
    creds: Path | None = None
    ca: Path | None = None
    locator: str | None = None


def _named(to: ConnectionOptions) -> bool:
    return bool(to.servers or to.locator)


def options(command: F) -> F:
    """What to connect to and as whom, handed to the command as one `Options` named ``to``."""
    import functools

    @functools.wraps(command)
    def with_options(
        *args: Any,
        servers: tuple[str, ...],
        creds: Path | None,
        ca: Path | None,
        locator: str | None,
        **kwargs: Any,
    ) -> Any:
        return command(*args, to=ConnectionOptions(servers, creds, ca, locator), **kwargs)

    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    decorated: Any = with_options
    for option in (
        click.option("--ca", type=path, help="Authority of the brokers' certificates."),
        click.option("--creds", type=path, help="Connect with these credentials."),
        click.option("--locator", metavar="URL", help="Ask this locator for the best broker."),
        click.option("--server", "servers", multiple=True, metavar="URL", help="Connect to this broker."),
    ):
        decorated = option(decorated)
    found: F = decorated
    return found


async def connect(
    invocation: cli_command.Invocation, to: ConnectionOptions, measure: metrics.Metrics | None = None
) -> api.Bus:
    """A connection by the first source there is; flags override its settings one by one."""
    import ssl

    from muster import connection

    found = resolve(invocation, to)
    tls = ssl.create_default_context(cafile=str(found.ca)) if found.ca else None
    return await connection.connect(
        found.servers, locator=found.locator, creds=found.creds, tls=tls, measure=measure
    )


def resolve(invocation: cli_command.Invocation, to: ConnectionOptions) -> ConnectionOptions:
    """What the flags, the profile and the home come to."""
    profile = _resolve(invocation, to)
    creds = to.creds or (Path(profile.creds) if profile.creds else None)
    ca = to.ca or (Path(profile.ca) if profile.ca else None)
    servers, locator = (to.servers, to.locator) if _named(to) else (profile.servers, profile.locator or None)
    return ConnectionOptions(tuple(servers), creds, ca, locator)


def _resolve(invocation: cli_command.Invocation, to: ConnectionOptions) -> profiles.Profile:
    from muster.cli import profiles

    name = invocation.profile or (None if invocation.home or _named(to) else profiles.current())
    if name is not None:
        profile = profiles.load(name)
        return _of_home(Path(profile.home)) if profile.home else profile
    if _named(to):
        return profiles.Profile()
    return _of_home(invocation.home)


def _of_home(home_: Path | None) -> profiles.Profile:
    """The domain that runs in a home, as its administrator."""
    from muster.app import home, identities
    from muster.cli import profiles
    from muster.core import errors

    settings = config_.load(cli_command.Invocation(home=home_))
    running = home.DomainFolder(settings.domain.folder).running()
    if running is None:
        option = f" --home {home_}" if home_ else ""
        raise errors.Unavailable(
            f"the domain {settings.domain.name} of {home.Home.find(home_).root} is not running",
            hint=f"start it with `muster up{option}`, or name another bus with --server or --profile",
        )
    creds = identities.open_keyring(settings).credentials_path(identities.ADMINISTRATOR)
    return profiles.Profile(servers=running.servers, creds=str(creds), ca=running.ca or "")
