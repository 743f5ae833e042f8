"""The adapters there are: ours, and those that other distributions name in ``muster.adapters``."""

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

OWN = {
    "process": "muster.manage.adapters.process:ProcessAdapter",
    "broker": "muster.manage.adapters.broker:BrokerAdapter",
    "http": "muster.manage.adapters.http:HttpAdapter",
    "memory": "muster.manage.adapters.memory:MemoryAdapter",
    "spark-query": "muster.manage.adapters.spark:SparkQueryAdapter",
    "systemd": "muster.manage.adapters.systemd:SystemdAdapter",
}


def names() -> list[str]:
    return sorted({*OWN, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS))})


@functools.cache
def load_adapter(name: str) -> type[base.Adapter]:
    """The adapter of this type, imported now; `errors.NotFound` names those there are."""
    found: type[base.Adapter]
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        return found
    for point in metadata.entry_points(group=ENTRY_POINTS, name=name):
        found = point.load()
        return found
    raise errors.NotFound(f"no adapter of type {name[:60]!r}", hint=f"there are: {', '.join(names())}")


def config_validators() -> dict[str, manifest.Check]:
    """For each type, what refuses a wrong configuration."""

    def check(name: str) -> manifest.Check:
        def refuse(config: Mapping[str, Any]) -> None:
            base.convert(load_adapter(name), config)

        return refuse

    return {name: check(name) for name in names()}
