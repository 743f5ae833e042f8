"""Mounts from their settings. A process passes in its back ends; `BACKENDS` need no gateway."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from muster.core import errors, subjects
from muster.inform.mounts import base

KINDS = ("etcd", "uddi")


class MountSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[inform.mounts]]`` of the settings."""

    name: str
    kind: str  # one of `KINDS`
    url: str  # etcd: of its client port; uddi: of its inquiry port
    prefix: str = ""  # etcd: only keys that begin so

    def __post_init__(self) -> None:
        subjects.token(self.name)
        if self.kind not in KINDS:
            raise errors.InvalidInput(f"no mount of the kind {self.kind!r}: one of {', '.join(KINDS)}")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise errors.InvalidInput(f"{self.url!r} of the mount {self.name!r} is no address of HTTP")


Backends: TypeAlias = Mapping[str, Callable[[MountSettings], base.MountBackend]]


def _etcd(settings: MountSettings) -> base.MountBackend:
    from muster.inform.mounts import etcd

    return etcd.EtcdMount(settings.url, settings.prefix)


BACKENDS: Backends = {"etcd": _etcd}  # gateways add theirs: `muster.gateways.uddi.mount`


def open_mount(settings: MountSettings, backends: Backends) -> base.MountedRegistry:
    backend = backends.get(settings.kind)
    if backend is None:
        raise errors.InvalidInput(
            f"this node cannot mount the kind {settings.kind!r}: only {', '.join(backends)}"
        )
    return base.MountedRegistry(settings.name, backend(settings))
