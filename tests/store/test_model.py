"""Random operations compared with a plain dictionary."""

from __future__ import annotations

import asyncio
import itertools

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from muster.core import errors
from muster.store import api, database

KEYS = st.sampled_from(["a", "a\0", "ab", "b", "é", "\U0010ffff"])
VALUES = st.binary(max_size=8)
EPOCHS = st.none() | st.integers(0, 4)
EXPECTED = st.sampled_from(["anything", "absent", "current", "older"])
WRITES = st.tuples(KEYS, st.none() | VALUES, EXPECTED, EPOCHS)
_numbers = itertools.count()


class StoreModel(stateful.RuleBasedStateMachine):
    """Each run works in a collection of its own, so that one store serves them all."""

    runner: asyncio.Runner
    store: database.Store

    def __init__(self) -> None:
        super().__init__()
        self.collection = f"c{next(_numbers)}"
        self.records: dict[str, api.StoreRecord] = {}
        self.feed: list[tuple[str, bytes | None]] = []
        self.position = self.runner.run(self.store.version())

    @stateful.rule(
        writes=st.lists(WRITES, min_size=1, max_size=4, unique_by=lambda value: value[0]), read=KEYS
    )
    def transaction(self, writes, read):
        expected = [(*write[:2], self._version(write[0], write[2]), write[3]) for write in writes]
        refusal = next(
            filter(None, (self._refusal(key, version, epoch) for key, _, version, epoch in expected)), None
        )

        async def run() -> int:
            async with self.store.transaction() as tx:
                assert await tx.get(self.collection, read) == self.records.get(read)
                for key, value, version, epoch in expected:
                    if value is None:
                        tx.delete(self.collection, key, expected_version=version, epoch=epoch)
                    else:
                        tx.put(self.collection, key, value, expected_version=version, epoch=epoch)
                own = {r.key: r.value for r in await tx.scan(self.collection)}
            after: dict[str, bytes | None] = {key: record.value for key, record in self.records.items()}
            after |= {key: value for key, value, *_ in writes}
            assert own == {key: value for key, value in after.items() if value is not None}
            return tx.version

        if refusal is not None:
            with pytest.raises(refusal):
                self.runner.run(run())
            return
        version = self.runner.run(run())
        for key, value, _, epoch in expected:
            old = self.records.pop(key, None)
            if value is not None:
                mark = epoch if epoch is not None else old.epoch if old else 0
                self.records[key] = api.StoreRecord(key, value, version, mark)
            if value is not None or old is not None:
                self.feed.append((key, value))

    def _version(self, key: str, expected: str) -> int | None:
        current = self.records[key].version if key in self.records else api.ABSENT
        return {"anything": None, "absent": 0, "current": current, "older": max(0, current - 1)}[expected]

    def _refusal(self, key: str, version: int | None, epoch: int | None) -> type[Exception] | None:
        record = self.records.get(key)
        if epoch is not None and record is not None and epoch < record.epoch:
            return errors.StaleEpoch
        if version is not None and version != (record.version if record else api.ABSENT):
            return errors.Conflict
        return None

    @stateful.rule(
        prefix=st.sampled_from(["", "a", "é"]),
        start=st.none() | KEYS,
        end=st.none() | KEYS,
        limit=st.none() | st.integers(0, 4),
        reverse=st.booleans(),
    )
    def scan(self, prefix, start, end, limit, reverse):
        result = self.runner.run(
            self.store.scan(
                self.collection, prefix=prefix, start=start, end=end, limit=limit, reverse=reverse
            )
        )
        expected = [
            self.records[key]
            for key in sorted(self.records, reverse=reverse)
            if key.startswith(prefix) and (start is None or key >= start) and (end is None or key < end)
        ]
        assert result == expected[:limit]

    @stateful.rule(limit=st.integers(1, 5))
    def follow(self, limit):
        seen: list[tuple[str, bytes | None]] = []
        position = self.position
        while True:
            page = self.runner.run(self.store.changes(position, collection=self.collection, limit=limit))
            seen += [(change.key, change.value) for change in page.changes]
            if page.position == position:
                break
            position = page.position
        assert seen == self.feed


def test_the_store_agrees_with_a_dictionary(place):
    with asyncio.Runner() as runner:
        store = runner.run(database.open(place.url, settings=place.settings, password=place.password))
        try:
            machine = type("Machine", (StoreModel,), {"runner": runner, "store": store})
            stateful.run_state_machine_as_test(
                machine,
                settings=hypothesis.settings(max_examples=25, stateful_step_count=25, deadline=None),
            )
        finally:
            runner.run(store.close())
