"""One person leaves room for the others: long reads take turns, watches are counted by login."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from muster.core import errors
from muster.testing.eventually import eventually
from muster.web.data import connections, history_reader, read_model, turns
from muster.web.rest import event_stream, resources
from tests.web.test_identity import NoDomain


async def test_many_searches_of_the_history_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    ended = threading.Event()

    def read_page(root: str, query: Any, limit: int, cursor: str) -> tuple[list[Any], None]:
        began.append(cursor)
        ended.wait(30)
        return [], None

    monkeypatch.setattr(history_reader, "read_page", read_page)
    source = read_model.ReadModel(NoDomain(), history="", domain="lab")
    searches = [
        asyncio.create_task(source.history("nodes", "", from_ms=None, to_ms=None, cursor=str(number)))
        for number in range(40)
    ]
    try:
        await eventually(lambda: len(began) >= read_model.LONG_AT_ONCE)
        async with asyncio.timeout(5):
            await asyncio.to_thread(int)  # such as the check of a login
        assert len(began) == read_model.LONG_AT_ONCE
    finally:
        ended.set()
        await asyncio.gather(*searches)
        await source.cache.close()
    assert len(began) == len(searches)


@pytest.mark.virtual_time
async def test_a_turn_is_not_awaited_for_ever() -> None:
    work = turns.WorkTurns(1, "searches")
    async with work.turn():
        with pytest.raises(errors.Overloaded, match="too many searches"):
            async with work.turn():
                pass
    async with work.turn():
        pass


def test_a_login_cannot_take_all_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "OF_LOGIN_MAX", 2)
    monkeypatch.setattr(event_stream, "WATCHES_MAX", 3)
    slot = event_stream.EventStreams.slot
    with slot("vic"), slot("vic"):
        with pytest.raises(errors.Overloaded, match="2 of vic"):
            slot("vic").__enter__()
        with slot("ann"), pytest.raises(errors.Overloaded, match="3 watches are already open"):
            slot("olga").__enter__()
    assert not event_stream.EventStreams.open


def test_an_operation_keeps_its_connection_to_its_end() -> None:
    limit = resources.ExecuteBody.model_json_schema()["properties"]["timeout_s"]["maximum"]
    assert limit < connections.IDLE_S
