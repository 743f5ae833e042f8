"""Planning is pure, so it is tested alone: a batch does what its commits would do one after another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.store import commit_plan

PLACES = [(collection, key) for collection in ("a", commit_plan.FENCES) for key in (b"k", b"l", b"m")]
RECORD_BYTES_MAX = 600

writes = st.builds(
    commit_plan.RecordWrite,
    value=st.none() | st.binary(max_size=120),
    expected_version=st.none() | st.integers(0, 6),
    epoch=st.none() | st.integers(0, 3),
)
ranges = st.builds(
    commit_plan.KeyRange,
    st.sampled_from(["a", "b"]),
    st.sampled_from([b"", b"k", b"l"]),
    st.none() | st.sampled_from([b"l", b"m"]),
)
batches = st.lists(
    st.builds(
        commit_plan.Commit,
        writes=st.dictionaries(st.sampled_from(PLACES), writes, max_size=4),
        snapshot=st.none() | st.integers(0, 8),
        keys_read=st.frozensets(st.sampled_from(PLACES), max_size=2),
        ranges_read=st.lists(ranges, max_size=1).map(tuple),
    ),
    max_size=6,
)


class Tables:
    """What an engine does with a plan, in memory."""

    def __init__(self, history_changes_max: int) -> None:
        self.limits = commit_plan.CommitLimits(RECORD_BYTES_MAX, history_changes_max)
        self.head = commit_plan.StoreHead()
        self.records: dict[commit_plan.Place, commit_plan.RecordPut] = {}
        self.feed: dict[int, commit_plan.FeedRow] = {}

    def commit(self, batch: list[commit_plan.Commit]) -> list[int | errors.MusterError]:
        oldest = commit_plan.oldest_snapshot(batch)
        stored = {
            place: commit_plan.RecordVersion(put.version, put.position, put.epoch, len(put.value))
            for place, put in self.records.items()
            if place in commit_plan.touched(batch)
        }
        recent = [
            (position, change.place)
            for position, change in sorted(self.feed.items())
            if oldest is not None and position > oldest
        ]
        plan = commit_plan.plan(batch, head=self.head, stored=stored, recent=recent, limits=self.limits)
        for place, position in plan.superseded.items():
            self.feed[position].value = self.records[place].value
        self.records |= plan.puts
        for place in plan.deletes:
            self.records.pop(place, None)
        self.feed |= {change.position: change for change in plan.changes}
        gone = [self.feed.pop(position) for position in list(self.feed) if position <= plan.head.trimmed]
        freed = sum(len(change.value or b"") for change in gone)
        self.head = commit_plan.StoreHead(
            plan.head.position, plan.head.trimmed, plan.head.record_bytes, plan.head.history_bytes - freed
        )
        return plan.outcomes


def comparable(outcomes: list[int | errors.MusterError]) -> list[object]:
    return [outcome if isinstance(outcome, int) else (type(outcome), str(outcome)) for outcome in outcomes]


@given(st.lists(batches, max_size=4))
def test_a_batch_does_what_its_commits_do_one_after_another(several):
    grouped, single = Tables(1_000), Tables(1_000)
    for batch in several:
        outcomes = grouped.commit(batch)
        assert comparable(outcomes) == comparable([single.commit([item])[0] for item in batch])
        assert grouped.records == single.records
        assert grouped.feed == single.feed
        assert grouped.head == single.head


@given(st.lists(batches, max_size=4))
def test_the_head_adds_up(several):
    tables = Tables(6)
    for batch in several:
        tables.commit(batch)
        head = tables.head
        assert head.record_bytes == sum(
            commit_plan.size(place, len(put.value)) for place, put in tables.records.items()
        )
        assert head.record_bytes <= RECORD_BYTES_MAX
        assert head.history_bytes == sum(len(change.value or b"") for change in tables.feed.values())
        assert sorted(tables.feed) == list(range(head.trimmed + 1, head.position + 1))
        for place, put in tables.records.items():
            if put.position > head.trimmed:
                assert tables.feed[put.position].place == place
                assert tables.feed[put.position].value is None
