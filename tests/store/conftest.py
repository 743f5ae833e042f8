"""A store of each engine: whoever takes `store` or `url` runs on all of them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from muster.store import api, database
from muster.testing import postgres

postgres_server = postgres.postgres_server

Opener = Callable[..., Awaitable[database.Store]]


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def reopen(engine: str, request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[Opener]:
    """Opens the same store, each time as another process would; settings may be given."""
    opened: list[database.Store] = []
    if engine == "sqlite":
        url, password, namespace = f"sqlite:{tmp_path}/store.db", None, "unused"
    else:
        server = request.getfixturevalue("postgres_server")
        url, password, namespace = server.url, server.password, f"t_{secrets.token_hex(6)}"

    async def open_one(**settings: Any) -> database.Store:
        chosen = msgspec.structs.replace(api.Settings(namespace=namespace), **settings)
        opened.append(await database.open(url, settings=chosen, password=password))
        return opened[-1]

    yield open_one
    for one in opened:
        await one.close()


@pytest.fixture
async def store(reopen: Opener) -> database.Store:
    return await reopen()
