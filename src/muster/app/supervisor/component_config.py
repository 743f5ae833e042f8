"""What a process of a domain gets: which component it runs, with which settings, and where the domain is."""

from __future__ import annotations

import msgspec

from muster.app import settings as app_settings


class ComponentConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``servers`` empty: the brokers of the settings, or those of the domain that runs in the folder of the
    settings. ``creds`` empty: by the keys of the domain; if there are none, the brokers know no
    identities."""

    component: str
    settings: app_settings.Settings
    identity: str = ""  # default: as the settings say
    process: str = ""  # its name in health pages and logs; default: its identity, or its component
    servers: tuple[str, ...] = ()
    locator: str = ""
    ca: str = ""
    creds: str = ""
    listener: int | None = None  # an open socket, in place of the host and port of the settings

    @property
    def name(self) -> str:
        return self.process or self.identity or self.component
