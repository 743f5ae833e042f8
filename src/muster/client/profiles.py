"""Profiles: named sets of connection settings of this user, one TOML file each.

They are stored in ``$XDG_CONFIG_HOME/muster/profiles`` (default ``~/.config``); the file ``current`` beside
them names the default profile.  A command connects with the first of these sources that is configured:

1. ``--server`` or ``--locator`` (and ``--creds``, ``--ca``, which override those of the other sources)
2. ``--profile``
3. ``--home``: its running domain, as the administrator
4. ``MUSTER_PROFILE``, then ``MUSTER_HOME``
5. the current profile (``muster profile use``)
6. the default home
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from muster.core import errors, files, subjects
from muster.core.net import hosts
from muster.core.settings import loader, sections


class Profile(sections.SettingsSection, frozen=True, kw_only=True):
    """How to connect to a domain."""

    servers: Annotated[
        tuple[str, ...],
        sections.field_doc("URLs of brokers. Name several, so that clients can fail over."),
    ] = ()
    locator: Annotated[
        str,
        sections.field_doc("URL of a locator, which recommends the best broker."),
    ] = ""
    creds: Annotated[sections.FilePath, sections.field_doc("File of credentials (`muster creds issue`).")] = (
        ""
    )
    ca: Annotated[
        sections.FilePath, sections.field_doc("Certificate authority of the brokers, if they use TLS.")
    ] = ""
    proxy: Annotated[str, sections.field_doc("HTTP proxy (http://HOST:PORT) on the way to the brokers.")] = ""
    home: Annotated[
        sections.FilePath,
        sections.field_doc("A home on this machine: connect to its running domain as the administrator."),
    ] = ""

    def __post_init__(self) -> None:
        for url in (*self.servers, self.locator, self.proxy):
            hosts.without_password(url, "a profile", "profiles are stored in plain text: use --creds FILE")


def folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else files.expanded("~/.config")) / "muster" / "profiles"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def current() -> str | None:
    try:
        return (folder() / "current").read_text().strip() or None
    except FileNotFoundError:
        return None


def load(name: str) -> Profile:
    return loader.load(Profile, file=_existing(name))


def save(name: str, profile: Profile) -> Path:
    path = _path(name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write(path, loader.to_toml(profile).encode())
    return path


def use(name: str) -> None:
    _existing(name)
    files.write(folder() / "current", f"{name}\n".encode())


def remove(name: str) -> None:
    _existing(name).unlink()
    if current() == name:
        (folder() / "current").unlink()


def _path(name: str) -> Path:
    return folder() / f"{subjects.token(name)}.toml"


def _existing(name: str) -> Path:
    path = _path(name)
    if not path.is_file():
        known = ", ".join(names())
        raise errors.NotFound(
            f"there is no profile {name!r}" + (f"; existing profiles: {known}" if known else ""),
            hint=f"create it with `muster profile add {name} --server URL --creds FILE`",
        )
    return path
