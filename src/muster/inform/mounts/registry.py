"""Mounts from the settings. A process passes in its back ends; `BACKENDS` has those without a gateway."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from muster.core import errors, subjects
from muster.inform.mounts import base

KINDS = ("etcd", "uddi")


class MountSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of ``[[inform.mounts]]`` in the settings."""

    name: str
    kind: str  # one of `KINDS`
    url: str  # of the client port of etcd, or the inquiry port of UDDI
    prefix: str = ""  # etcd only: mount the keys with this prefix

    def __post_init__(self) -> None:
        subjects.token(self.name)
        if self.kind not in KINDS:
            raise errors.InvalidInput(f"unknown kind of mount {self.kind!r}: use one of {', '.join(KINDS)}")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise errors.InvalidInput(
                f"the url {self.url!r} of the mount {self.name!r} is not an HTTP address"
            )


Backends: TypeAlias = Mapping[str, Callable[[MountSettings], base.MountBackend]]


def _etcd(settings: MountSettings) -> base.MountBackend:
    from muster.inform.mounts import etcd

    return etcd.EtcdMount(settings.url, settings.prefix)


BACKENDS: Backends = {"etcd": _etcd}  # gateways add more: `muster.gateways.uddi.mount`


def open_mount(settings: MountSettings, backends: Backends) -> base.MountedRegistry:
    backend = backends.get(settings.kind)
    if backend is None:
        raise errors.InvalidInput(
            f"no back end for mounts of the kind {settings.kind!r}: there are {', '.join(backends)}"
        )
    return base.MountedRegistry(settings.name, backend(settings))
