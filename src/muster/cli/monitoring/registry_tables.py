"""The tables of the registry for `muster sql`: what it returns to clients, at the time of the query."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from muster.manage import client, rows

if TYPE_CHECKING:
    import pyarrow as pa


class RegistryTable(typing.NamedTuple):
    row: type[msgspec.Struct]
    read: Callable[[client.ManageClient], Awaitable[Sequence[msgspec.Struct]]]


TABLES = {
    "resources": RegistryTable(rows.ResourceRow, client.ManageClient.get),
    "agents": RegistryTable(rows.AgentRow, client.ManageClient.agents),
    "managers": RegistryTable(rows.ManagerRow, client.ManageClient.managers),
    "rollouts": RegistryTable(rows.RolloutRow, client.ManageClient.rollouts),
    "jobs": RegistryTable(rows.JobRow, client.ManageClient.jobs),
    "secrets": RegistryTable(rows.SecretRow, client.ManageClient.secrets),
    "orphans": RegistryTable(rows.OrphanRow, client.ManageClient.orphans),
}


async def read(fleet: client.ManageClient, names: Iterable[str]) -> dict[str, pa.Table]:
    names = sorted(names)
    results = await asyncio.gather(*(TABLES[name].read(fleet) for name in names))
    return {name: to_table(TABLES[name].row, stored) for name, stored in zip(names, results, strict=True)}


def to_table(kind: type[msgspec.Struct], stored: Sequence[msgspec.Struct]) -> pa.Table:
    """A column for each field. Lists of names are lists; other nested values are JSON."""
    import pyarrow as pa

    columns: dict[Any, Any] = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    columns |= {kind | None: type_ for kind, type_ in columns.items()}
    columns[list[str]] = pa.list_(pa.string())
    types = {name: columns.get(hint, pa.string()) for name, hint in typing.get_type_hints(kind).items()}

    def value(row: msgspec.Struct, name: str) -> Any:
        plain = getattr(row, name)
        is_json = types[name] == pa.string() and not (plain is None or isinstance(plain, str))
        return msgspec.json.encode(plain).decode() if is_json else plain

    return pa.table(
        {name: pa.array([value(row, name) for row in stored], type_) for name, type_ in types.items()}
    )
