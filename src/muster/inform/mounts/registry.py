"""The kinds of registries that can be mounted, and a mount from its settings."""

from __future__ import annotations

import urllib.parse

import msgspec

from muster.core import errors, subjects
from muster.inform.mounts import base


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


def _etcd(wanted: MountSettings) -> base.MountBackend:
    from muster.inform.mounts import etcd

    return etcd.EtcdMount(wanted.url, wanted.prefix)


def _uddi(wanted: MountSettings) -> base.MountBackend:
    from muster.gateways.uddi import mount

    return mount.UddiMount(wanted.url)


KINDS = {"etcd": _etcd, "uddi": _uddi}


def open_mount(wanted: MountSettings) -> base.MountedRegistry:
    return base.MountedRegistry(wanted.name, KINDS[wanted.kind](wanted))
