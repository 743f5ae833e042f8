"""The soak's own judgement: ledgers, slopes, the block of the page; and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak import __main__ as soak
from tests.soak import faults, ledgers, result, trends
from tools import site


def test_a_ledger_names_what_is_lost_doubled_and_never_sent():
    ledger = ledgers.DeliveryLedger("queue")
    for number in (1, 2, 3):
        ledger.accepted(number, at_s=number)
    ledger.failed(4)
    for number in (1, 2, 2, 4, 9):
        ledger.received(number, at_s=number + 0.5)
    ledger.received(1, at_s=3.0, repeated=True)
    assert ledger.violations() == [
        "queue: 1 lost: [3]",
        "queue: 1 doubled: [2]",
        "queue: 1 never sent: [9]",
    ]
    assert (ledger.marked, ledger.delay_max_s) == (1, 0.5)
    assert ledger.overdue(before_s=3.1) == [3]


def test_a_read_returns_an_acknowledged_number_or_one_in_doubt_after_it():
    ledger = ledgers.WriteLedger("context")
    ledger.wrote("a", ledger.begin("a"))
    ledger.begin("a")  # in doubt
    for number in (1, 2):
        ledger.read("a", number, ledger.floor("a"))
    assert ledger.violations() == []
    ledger.read("a", 0, ledger.floor("a"))
    ledger.read("a", 3, ledger.floor("a"))
    assert ledger.violations() == ["context: a is 0, not 1 to 2", "context: a is 3, not 1 to 2"]


def samples(per_hour: float, *, lives: int = 1, outlier: float = 0.0) -> list[trends.SizeSample]:
    """Samples of an hour, of a size that begins each life of the process at 100 MB."""
    taken = []
    for number in range(360):
        at_s, life = 10.0 * number, number * lives // 360
        age_s = at_s - life * 3600.0 / lives
        noise = outlier if number % 10 == 0 else 1e5 * (number % 3)
        taken.append(trends.SizeSample(at_s, life, 100e6 + per_hour * age_s / 3600 + noise))
    return taken


def test_a_leak_is_found_through_noise_outliers_and_restarts():
    for lives in (1, 2):
        grows = trends.trend("manager-1", "memory", samples(30e6, lives=lives, outlier=80e6))
        assert grows.per_hour == pytest.approx(30e6, rel=0.1)
        assert not grows.is_level
        assert trends.trend("manager-1", "memory", samples(2e6, lives=lives, outlier=80e6)).is_level
    assert trends.trend("manager-1", "memory", samples(30e6, lives=4)).per_hour is None, "lives too short"


def test_every_kind_fails_in_turn_and_later_only_the_first_of_several():
    processes = {
        "web": 1,
        "broker local-1": 2,
        "broker local-2": 3,
        "manager-1": 4,
        "manager-2": 5,
        "domain": 6,
    }
    everything = [faults.choose(processes, turn, spares=False) for turn in range(len(faults.KINDS))]
    assert [name for group in everything for name in group] == [
        "broker local-1",
        "broker local-2",
        "manager-1",
        "manager-2",
        "web",
    ]
    later = [faults.choose(processes, turn, spares=True) for turn in range(3)]
    assert later == [{"broker local-1": 2}, {"manager-1": 4}, {"broker local-1": 2}]
    assert faults.choose({"web": 1}, 0, spares=True) == {}


def test_the_page_shows_the_stored_result():
    assert result.markdown(json.loads(result.FILE.read_text())) in site.text_of("reliability.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.may_block(reason="the drill reads settings, keys and files of processes between its steps")
async def test_some_minutes_of_load_lose_nothing(tmp_path: Path):
    done = await soak.soak(3.0, 100, 7, spark=False, folder=tmp_path / "home")
    assert done["summary"]["violations"] == []
    assert min(row["accepted"] for row in done["summary"]["deliveries"]) > 100
