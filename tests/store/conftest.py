"""A store of each engine: whoever takes `store` runs on all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from muster.store import database


@pytest.fixture(params=["sqlite"])
def url(request, tmp_path):
    return f"sqlite:{tmp_path}/store.db"


@pytest.fixture
async def store(url) -> AsyncIterator[database.Store]:
    async with await database.open(url) as opened:
        yield opened
