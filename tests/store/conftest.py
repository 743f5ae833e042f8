"""A store of each engine: tests with `store` or `reopen` run on all of them."""

from __future__ import annotations

import pathlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from muster.store import api, database
from tests import postgres

postgres_server = postgres.postgres_server

Opener = Callable[..., Awaitable[database.Store]]


@dataclass(frozen=True)
class Place:
    """Where one test's store is."""

    url: str
    password: str | None
    settings: api.StoreOptions


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Place:
    if request.param == "sqlite":
        return Place(f"sqlite:{tmp_path}/store.db", None, api.StoreOptions())
    server = request.getfixturevalue("postgres_server")
    return Place(server.url, server.password, api.StoreOptions(namespace=f"t_{secrets.token_hex(6)}"))


@pytest.fixture
async def reopen(place: Place) -> AsyncIterator[Opener]:
    """Opens the same store, each time as another process would; settings may be given."""
    opened: list[database.Store] = []

    async def open_one(**changes: Any) -> database.Store:
        settings = msgspec.structs.replace(place.settings, **changes)
        opened.append(await database.open(place.url, settings=settings, password=place.password))
        return opened[-1]

    yield open_one
    for item in opened:
        await item.close()


@pytest.fixture
async def store(reopen: Opener) -> database.Store:
    return await reopen()
