"""The available adapters: built-in ones, and those of other distributions in ``muster.adapters``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from muster.core import errors
from muster.manage import manifest
from muster.manage.adapters import base

ENTRY_POINTS = "muster.adapters"

BUILT_IN = {
    "process": "muster.manage.adapters.process:ProcessAdapter",
    "broker": "muster.manage.adapters.broker:BrokerAdapter",
    "container": "muster.manage.adapters.containers.container:ContainerAdapter",
    "file": "muster.manage.adapters.file:FileAdapter",
    "http": "muster.manage.adapters.http:HttpAdapter",
    "memory": "muster.manage.adapters.memory:MemoryAdapter",
    "spark-query": "muster.manage.adapters.spark:SparkQueryAdapter",
    "systemd": "muster.manage.adapters.systemd:SystemdAdapter",
}


_registered: dict[str, type[base.Adapter]] = {}


def register(name: str, adapter: type[base.Adapter]) -> None:
    """Add an adapter of this process, which no distribution declares."""
    if name in BUILT_IN:
        raise errors.AlreadyExists(f"the type {name!r} is built in")
    _registered[name] = adapter
    load_adapter.cache_clear()


def unregister(name: str) -> None:
    _registered.pop(name, None)
    load_adapter.cache_clear()


def names() -> list[str]:
    return sorted(
        {*BUILT_IN, *_registered, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS))}
    )


@functools.cache
def load_adapter(name: str) -> type[base.Adapter]:
    """Import the adapter of this type; `errors.NotFound` lists the available types."""
    adapter: type[base.Adapter]
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        adapter = getattr(importlib.import_module(module), attribute)
        return adapter
    for point in metadata.entry_points(group=ENTRY_POINTS, name=name):
        adapter = point.load()
        return adapter
    raise errors.NotFound(f"no adapter of type {name[:60]!r}", hint=f"available: {', '.join(names())}")


def can_move(name: str) -> bool:
    """Whether resources of this type can be started on another machine if theirs is lost."""
    return load_adapter(name).can_move


def has_hooks(name: str) -> bool:
    """Whether resources of this type run hooks."""
    return load_adapter(name).has_hooks


def config_validators() -> dict[str, manifest.Check]:
    """For each type, a function that rejects invalid configurations."""

    def check(name: str) -> manifest.Check:
        def validate(config: Mapping[str, Any]) -> None:
            base.convert(load_adapter(name), config)

        return validate

    return {name: check(name) for name in names()}
