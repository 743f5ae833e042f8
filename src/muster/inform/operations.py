"""The columns of contexts, replicas, versions and service entries: see `muster.bus.rpc.operations`."""

from __future__ import annotations

CONTEXTS = ("key", "version", "attributes", "age_s", "source?")
REPLICAS = ("node", "replica_kind", "version", "age_s", "demand")
VERSIONS = ("version", "reason", "value", "attributes", "writer", "stamp?")
ENTRIES = ("id", "name", "access", "metadata?", "source?")
