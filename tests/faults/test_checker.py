"""The harness judges a stored history as it happened, and its table is the one of the documentation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from tests.faults import checker, history, nemesis, table
from tools import site

pytestmark = pytest.mark.asyncio


async def store(file: Path, *, lost: str = "", interrupted: bool = False) -> None:
    """Messages 1 to 3; message 2 is sent and received during a fault."""
    run = {"fault": "kill-broker", "workloads": ["queues"], "date": "2026-01-01", "load": 0.5}
    story = history.StoredHistory(file, **run)
    fault = None
    for number in ("1", "2", "3"):
        if number == "2":
            fault = story.begin("nemesis", "fault", fault="kill-broker")
        await asyncio.sleep(2.0 if number == "2" else 1.0)
        send = story.begin("sender", "send", key="queue:q", id=number)
        story.end(send, "ok")
        if number != lost:
            story.event("ann", "received", key="queue:q", source="queue:q", id=number, redelivered=False)
        if number == "2" and fault is not None:
            story.end(fault, "ok")
    story.begin("sender", "send", key="queue:q", id="4")  # its outcome is unknown
    if not interrupted:
        story.event("nemesis", "load-ended")
    story.close()


@pytest.mark.virtual_time
async def test_a_stored_history_is_checked_as_it_happened(tmp_path: Path):
    await store(tmp_path / "h.jsonl")
    (result,) = checker.check(tmp_path / "h.jsonl")
    assert result == checker.Result(
        fault="kill-broker",
        workload="queues",
        operations=7,
        violations=(),
        unavailable_s=2.0,
        restored_s=1.0,
        date="2026-01-01",
        load=0.5,
    )
    assert "| 1 | 7 | 0 | killed 2.0 s |" in table.text([result])
    lasting = msgspec.structs.replace(result, fault="disk-full")
    assert "| 1 | 7 | 0 | 2.0 s (1.0 s after the fault) |" in table.text([lasting])


@pytest.mark.virtual_time
async def test_a_lost_message_and_an_interrupted_run_are_violations(tmp_path: Path):
    await store(tmp_path / "lost.jsonl", lost="2")
    (result,) = checker.check(tmp_path / "lost.jsonl")
    assert "was not received" in result.violations[0]
    await store(tmp_path / "cut.jsonl", interrupted=True)
    (result,) = checker.check(tmp_path / "cut.jsonl")
    assert result.violations == ("queues: the run was interrupted",)
    (tmp_path / "cut.jsonl").write_text((tmp_path / "cut.jsonl").read_text() + '{"begin":')
    (result,) = checker.check(tmp_path / "cut.jsonl")
    assert result.violations == ("queues: the run was interrupted",)


@pytest.mark.virtual_time
async def test_a_client_that_never_works_again_is_unavailable_until_the_end(tmp_path: Path):
    await store(tmp_path / "h.jsonl")
    story = history.LoadedHistory(tmp_path / "h.jsonl")
    since_s = next(story.of("fault")).start_s
    assert checker.longest_gap_s(story, ("send",), since_s, since_s + 9.0) == 6.0
    assert checker.longest_gap_s(story, ("acknowledge",), since_s, since_s + 9.0) == 0.0


async def test_the_documentation_has_a_row_for_every_stored_result():
    results = table.load()
    assert {result.fault for result in results} <= set(nemesis.FAULTS)
    assert table.markdown(json.loads(table.RESULTS.read_text())) in site.text_of("reliability.md")
