"""Reports for the tests of this folder: small fleets, messages as channels send them."""

import time

import numpy as np

from muster.bus import api
from muster.bus.client import client
from muster.core import messages
from muster.core.reports import columns
from muster.pipeline.fleet import cells

SUBJECT = "muster.monitor.from.c1.batch.root.0"
STREAM = api.StreamSettings(columns.REPORTS_STREAM, (columns.REPORTS_SUBJECTS,))


class OnlyDriver:
    """The authority of a driver without competitors."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch

    def check(self) -> None:
        pass

    async def confirm(self) -> None:
        pass


def report(machine: str, sequence: int, at_ms: int, **more) -> messages.NodeReport:
    metrics = {"cpu_percent": 10.0, "memory_percent": 20.0, **more.pop("metrics", {})}
    return messages.NodeReport(
        machine=machine,
        sequence=sequence,
        at_ms=at_ms,
        period_s=more.pop("period_s", 10.0),
        metrics=metrics,
        **more,
    )


def fold(cell: cells.WindowCell, values: cells.Floats) -> None:
    """Add reports to a cell: a row for each metric, a column for each report; NaN where not measured."""
    reports = values.shape[1]
    zeros, no = np.zeros(reports, np.int64), np.zeros(reports, np.bool_)
    cell.table.add_reports(np.full(reports, cell.row), values, zeros, zeros, no, no)


def body(rows: list[messages.NodeReport], **facts) -> bytes:
    return columns.encode(columns.to_batch(rows), columns.BatchInfo(channel="c1", **facts))


def now_ms() -> int:
    return int(time.time() * 1000)


async def store(url: str, *bodies: bytes) -> None:
    async with await client.connect([url], identity="c1") as bus:
        stream = await bus.stream(STREAM)
        for start in range(0, len(bodies), 500):
            await stream.publish_batch(
                [api.OutgoingMessage(SUBJECT, item) for item in bodies[start : start + 500]]
            )
