"""A checkpoint of another version: the error names it, and the history has every report once."""

import asyncio
import re
from pathlib import Path

import pytest

from muster.bus.client import client
from muster.core import messages
from muster.pipeline import settings
from muster.pipeline.fleet import node_columns, state
from muster.pipeline.job import checkpoint_label, query, query_plan, service
from muster.testing.eventually import eventually
from tests.pipeline import test_history, test_job, traffic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]


def stored(root: Path) -> list[tuple[str, int]]:
    return sorted((row["machine"], row["sequence"]) for row in test_history.read(root))


def uncommit(root: Path) -> None:
    """Remove the last commit of reports from the log: its files stay."""
    log = root / "nodes" / "_delta_log"
    while len(stored(root)) > 20:
        sorted(log.glob("*.json"))[-1].unlink()


def rows(sequence: int) -> list[messages.NodeReport]:
    return [traffic.report(f"m{n}", sequence, traffic.now_ms(), group=f"g{n}") for n in range(20)]


@pytest.mark.slow
async def test_behind_an_older_versions_checkpoint_reading_goes_on_and_a_torn_batch_is_read_again(
    broker, spark, tmp_path
):
    root, folder = tmp_path / "history", tmp_path / "pipeline" / "checkpoint"
    for sequence in (1, 2):
        await traffic.store(broker.url, traffic.body(rows(sequence)))
        async with test_job.running(broker, spark, tmp_path) as ask:
            await eventually(lambda: test_job._read(ask, 20), timeout_s=300)
    # As if the process had been killed when the files of the last batch were written, but not committed.
    uncommit(root)
    assert len(stored(root)) == 20
    path = folder / checkpoint_label.LABEL
    path.write_text(re.sub(r'"version":\d+', '"version":1', path.read_text()))
    await traffic.store(broker.url, traffic.body(rows(3)))
    async with test_job.running(broker, spark, tmp_path, shards=4) as ask:
        await eventually(lambda: test_job._read(ask, 40), timeout_s=300)
    assert stored(root) == sorted((f"m{n}", sequence) for sequence in (1, 2, 3) for n in range(20))
    (aside,) = folder.parent.glob("checkpoint-of-version-1-*")
    assert list(aside.glob("drivers/*/spark/commits/[0-9]*"))


@pytest.mark.slow
async def test_state_that_another_version_wrote_ends_the_pipeline_with_what_to_do_and_nothing_is_lost(
    broker, spark, tmp_path, monkeypatch
):
    """The label says nothing of it: the query itself wrote its state in another way."""
    await traffic.store(broker.url, traffic.body(rows(1)))
    root, folder = tmp_path / "history", tmp_path / "pipeline" / "checkpoint"
    with monkeypatch.context() as patched:
        patched.setattr(query, "processor", another_version)
        async with test_job.running(broker, spark, tmp_path) as ask:
            await eventually(lambda: test_job._batch(ask, 1), timeout_s=300)
    async with await client.connect([broker.url], identity="pipeline") as bus:
        pipeline_settings = settings.PipelineSettings(trigger_s=0.5, window_s=1.0, shards=2)
        places = service.PipelinePaths(tmp_path, (broker.url,))
        pipeline_service = await asyncio.to_thread(
            service.PipelineService, bus, pipeline_settings, places, spark=spark
        )
        with pytest.raises(
            checkpoint_label.CheckpointUnusable, match="not written by this version"
        ) as refused:
            await asyncio.wait_for(pipeline_service.run(), 300)
    assert f"move {folder} away" in (refused.value.hint or "")
    folder.rename(tmp_path / "away")
    async with test_job.running(broker, spark, tmp_path) as ask:
        await eventually(lambda: test_job._read(ask, 20), timeout_s=300)
    assert stored(root) == sorted((f"m{n}", 1) for n in range(20))


def another_version(plan: query_plan.QueryPlan, folder: str):
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Other(StatefulProcessor):
        def init(self, handle) -> None:
            self._state = handle.getValueState("fleet", "version string, data binary")
            self._names = handle.getValueState("names", "data binary")

        def handleInputRows(self, key, rows, timerValues):
            list(rows)
            self._state.update(("", b"\x91\x63"))
            return iter(())

        def close(self) -> None:
            pass

    return Other()


@pytest.mark.parametrize("data", [b"", b"\x91\x63", b"\xc0", b"\x96" + bytes([state.LAYOUT]), b"rubbish"])
def test_state_of_another_layout_is_named_as_such(data):
    with pytest.raises(state.StateUnreadable, match=state.UNREADABLE):
        state.FleetState.unpack(data, state.FleetStatePlan(), node_columns.NodeNames())


def test_a_checkpoint_that_does_not_fit_is_refused_with_what_to_do(tmp_path):
    folder = tmp_path / "checkpoint"
    label = checkpoint_label.open_(str(folder))
    assert checkpoint_label.open_(str(folder)) == label
    path = folder / checkpoint_label.LABEL
    path.write_text(path.read_text().replace(f'"version":{checkpoint_label.VERSION}', '"version":99'))
    with pytest.raises(checkpoint_label.CheckpointUnusable, match="has version 99") as refused:
        checkpoint_label.open_(str(folder))
    assert "move" in (refused.value.hint or "")
    path.write_text("rubbish")
    with pytest.raises(checkpoint_label.CheckpointUnusable, match="cannot be read"):
        checkpoint_label.open_(str(folder))
    path.unlink()
    (folder / "offsets").mkdir()
    with pytest.raises(checkpoint_label.CheckpointUnusable, match="did not create"):
        checkpoint_label.open_(str(folder))


def test_a_checkpoint_of_an_older_version_is_set_aside_and_a_new_one_begun(tmp_path):
    folder = tmp_path / "checkpoint"
    old = checkpoint_label.open_(str(folder))
    (folder / "spark").mkdir()
    path = folder / checkpoint_label.LABEL
    path.write_text(path.read_text().replace(f'"version":{checkpoint_label.VERSION}', '"version":1'))
    assert checkpoint_label.open_(str(folder)).version == checkpoint_label.VERSION
    assert not (folder / "spark").exists()
    assert (tmp_path / f"checkpoint-of-version-1-{old.run}" / "spark").is_dir()
