"""Where the domain is: the servers and credentials that a command or a program connects with.

`muster.client.profiles` lists the sources in their order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.app import home as home_
    from muster.app import settings as app_settings
    from muster.bus import api
    from muster.client import profiles
    from muster.core.settings import domain as settings_domain
    from muster.core.telemetry import metrics
    from muster.trust import credentials
    from muster.trust.permissions import roles


@dataclass(frozen=True)
class ConnectionOptions:
    servers: tuple[str, ...] = ()
    creds: Path | None = None
    ca: Path | None = None
    locator: str | None = None
    proxy: str | None = None

    @property
    def names_server(self) -> bool:
        return bool(self.servers or self.locator)


NO_OPTIONS = ConnectionOptions()


def from_environment(
    home: str | Path | None = None, profile: str | None = None
) -> tuple[Path | None, str | None]:
    """The home and the profile that were given or, without both, those of ``MUSTER_HOME`` and
    ``MUSTER_PROFILE``.
    """
    if home is None and profile is None:
        home, profile = os.environ.get("MUSTER_HOME") or None, os.environ.get("MUSTER_PROFILE") or None
    return Path(home) if home is not None else None, profile


def resolve(
    home: Path | None, profile: str | None, options: ConnectionOptions = NO_OPTIONS
) -> ConnectionOptions:
    """Combine the options, the profile and the home; options override."""
    chosen = _profile(home, profile, options)
    creds = options.creds or (Path(chosen.creds) if chosen.creds else None)
    ca = options.ca or (Path(chosen.ca) if chosen.ca else None)
    named = options.names_server
    servers, locator = (options.servers, options.locator) if named else (chosen.servers, chosen.locator)
    return ConnectionOptions(tuple(servers), creds, ca, locator or None, chosen.proxy or None)


def find_home(home: Path | None, profile: str | None) -> home_.Home | None:
    """The home on this machine that the domain is run from; None for a domain elsewhere."""
    from muster.app import home as home_
    from muster.client import profiles

    name = profile or (None if home else profiles.current())
    if name is not None:
        place = profiles.load(name).home
        return home_.Home.find(Path(place)) if place else None
    selected = home_.Home.find(home)
    return selected if home is not None or selected.settings_file.is_file() else None


def find() -> ConnectionOptions | None:
    """The domain that a command without options uses; None where there is neither a profile nor a home."""
    from muster.client import profiles

    home, profile = from_environment()
    if not (home or profile or profiles.current()) and find_home(None, None) is None:
        return None
    return resolve(home, profile)


async def connect(
    target: ConnectionOptions,
    creds: credentials.Credentials | None = None,
    measure: metrics.Metrics | None = None,
) -> api.Bus:
    """A connection to ``target``, with its credentials or with ``creds``."""
    import asyncio

    from muster import connection

    tls = await asyncio.to_thread(connection.trusting, target.ca) if target.ca else None
    return await connection.connect(
        target.servers,
        locator=target.locator,
        creds=creds or target.creds,
        tls=tls,
        proxy=target.proxy,
        measure=measure,
    )


async def connect_as(
    home: Path, name: str, role: roles.Role, measure: metrics.Metrics | None = None
) -> api.Bus:
    """A connection to the running domain of a home as ``name``, with credentials that its keys sign."""
    import asyncio

    from muster.app import identities

    target = await asyncio.to_thread(resolve, home, None)  # it runs
    settings = await asyncio.to_thread(load_settings, home)
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    creds = await asyncio.to_thread(identities.credentials, trust, name, role)
    return await connect(target, creds, measure)


def load_settings(home: Path | None) -> app_settings.Settings:
    """The settings of a home, with those of the environment."""
    from muster.app import home as home_
    from muster.app import settings as app_settings
    from muster.core.settings import loader

    file = home_.Home.find(home).expect().settings_file
    return loader.load(app_settings.Settings, file=file, env=os.environ)


def shared_settings(home: Path | None) -> settings_domain.BaseSettings:
    """The settings that all processes share: quick, because those of a service import the service."""
    from muster.app import home as home_
    from muster.core.settings import domain, loader

    file = home_.Home.find(home).expect().settings_file
    return loader.load(domain.BaseSettings, file=file, env=os.environ, whole=False)


def _profile(home: Path | None, profile: str | None, options: ConnectionOptions) -> profiles.Profile:
    from muster.client import profiles

    name = profile or (None if home or options.names_server else profiles.current())
    if name is not None:
        chosen = profiles.load(name)
        return _of_home(Path(chosen.home)) if chosen.home else chosen
    return profiles.Profile() if options.names_server else _of_home(home)


def _of_home(home: Path | None) -> profiles.Profile:
    """The profile of a home's running domain, as its administrator."""
    from muster.app import home as home_
    from muster.app import identities
    from muster.client import profiles
    from muster.core import errors

    settings = shared_settings(home)
    running = home_.DomainFolder(settings.domain.folder).running()
    if running is None:
        option = f" --home {home}" if home else ""
        raise errors.Unavailable(
            f"the domain {settings.domain.name} of {home_.Home.find(home).root} is not running",
            hint=f"start it with `muster up{option}`, or select another bus with --server or --profile",
        )
    creds = identities.open_keyring(settings).credentials_path(identities.ADMINISTRATOR)
    return profiles.Profile(
        servers=running.servers, creds=str(creds), ca=running.ca or "", proxy=settings.bus.proxy
    )
