"""The monitor: one channel on one core, XML beside JSON beside Arrow, and the model beside what is measured.

The reports are those of the plain and of the realistic fleet of ``bench-pipeline``; rows that do not name a
fleet are of the plain one.  A channel's figure is of its own CPU time: reports a second that one core would
carry, from the socket to the stored Arrow message.  The forms are compared in one process, each reading a
message of 1,000 reports, counting each report once, and writing what goes on: XML with lxml as the paper did
and JSON with msgspec, both uncompressed; and Arrow as our channels do, with LZ4 in and out.  Sizes are
compared under the same codec on both sides.

The capacities are the model's, from the costs measured here: the paper's own figures are lost.  Most of the
model's propagation time is holding times and the trigger, which are settings: how much is a row of its own,
and so is what is left on both sides without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from benchmarks import harness, measure, monitor_figures, monitor_rows, monitor_xml
from muster.app.operations import capacity_check
from muster.bus.brokers import broker, config
from muster.bus.client import client as bus_client
from muster.core import errors, messages
from muster.core.reports import columns
from muster.monitor import capacity_model, capacity_plan, client, protocol, report_xml
from muster.monitor.channel import aggregator, interpreters
from muster.monitor.channel import channel as channel_channel
from muster.simulate import fleet, playback
from muster.testing.eventually import eventually

ROWS = 1000
MILLION_ROWS_S = 100_000  # a million machines at a period of 10 s
UP = interpreters.ForwardTarget("up", (protocol.ROOT,))

WORKER = "benchmarks.monitor_worker"
QUICK_S_MAX = 420
MACHINES = 20_000
BLOCK = 20_000
PROFILES = ("plain", "realistic")
HOLDS_S = (0.7, 1.1)  # without a common measure: in time every report meets every phase of both
TRIGGER_S = 5.0  # half of the default, so that a short run has batches enough


def run(quick: bool) -> list[harness.Row]:
    for profile in PROFILES:
        print(f"  {monitor_rows.plan(MACHINES, profile).describe()}")
    forms = measure_forms("plain", SIZES, rounds=3 if quick else 9)
    realistic = measure_forms("realistic", (ROWS,), rounds=3 if quick else 9)
    channel_s = asyncio.run(measure_channel("plain", 200_000 if quick else 600_000, quick))
    realistic_channel_s = asyncio.run(measure_channel("realistic", 60_000 if quick else 200_000, quick))
    predicted_s, measured_s = asyncio.run(_propagation(quick))
    result = asyncio.run(_whole_way(quick))
    if not quick:
        monitor_figures.draw(
            {name: forms[name] for name in ("xml", "arrow")}, trees_of(forms, channel_s), channel_s
        )
    return [
        harness.Row(
            metric="one channel, single reports, a core",
            ours=channel_s,
            unit="reports/s",
            better="higher",
            goal=50_000,
            load=monitor_rows.plan(MACHINES, "plain").describe(),
        ),
        harness.Row(
            metric="channel cores for a million machines at 10 s",
            ours=MILLION_ROWS_S / channel_s,
            unit="cores",
            better="lower",
        ),
        harness.Row(
            metric="one channel, single reports of the realistic fleet, a core",
            ours=realistic_channel_s,
            unit="reports/s",
            better="higher",
            load=monitor_rows.plan(MACHINES, "realistic").describe(),
        ),
        *harness.under(
            monitor_rows.plan(ROWS, "plain").describe(),
            _form_rows("batches of 1,000", "size of a report in a batch", forms, goal=20, paper=500),
        ),
        *harness.under(
            monitor_rows.plan(ROWS, "realistic").describe(),
            _form_rows(
                "batches of 1,000, realistic fleet", "size of a report in a batch, realistic fleet", realistic
            ),
        ),
        harness.Row(
            metric="two levels: propagation, longest",
            ours=measured_s,
            unit="s",
            better="lower",
            peer=predicted_s,
            peer_name="the model's worst case",
        ),
        harness.Row(
            metric="two levels: model beside measured",
            ours=100 * abs(predicted_s / measured_s - 1),
            unit="% apart",
            better="lower",
            goal=20,
        ),
        *_waiting_rows("two levels", sum(HOLDS_S), predicted_s, measured_s),
        *_whole_rows(result),
        *_hierarchies(forms, channel_s),
    ]


def _form_rows(
    speed: str, size: str, forms: dict[str, Form], *, goal: float | None = None, paper: float | None = None
) -> list[harness.Row]:
    """Arrow beside XML and JSON: how many reports a second of CPU, and how large under the same codec."""
    arrow, as_xml, as_json = forms["arrow"], forms["xml"], forms["json"]
    speeds = [
        harness.Row(
            metric=f"{speed}: Arrow beside {label}",
            ours=1 / arrow.row_s,
            unit="reports/s",
            better="higher",
            peer=1 / form.row_s,
            peer_name=peer_name,
            goal=goal if form is as_xml else None,
            goal_is="ratio",
        )
        for label, form, peer_name in (("XML", as_xml, "XML, lxml"), ("JSON", as_json, "JSON, msgspec"))
    ]
    sizes = [
        harness.Row(
            metric=size if codec == SHIPPED else f"{size}, {codec or 'uncompressed'}",
            ours=arrow.bytes_a_row[codec],
            unit="bytes",
            better="lower",
            paper=paper if codec == SHIPPED else None,
            peer=as_xml.bytes_a_row[codec],
            peer_name=f"XML, {codec}" if codec else "XML",
        )
        for codec in CODECS
    ]
    return [*speeds, *sizes]


def _waiting_rows(name: str, waiting_s: float, predicted_s: float, measured_s: float) -> list[harness.Row]:
    """How much of a propagation time is configured, and what both sides have beyond it."""
    return [
        harness.Row(
            metric=f"{name}: configured waiting in the model's worst case",
            ours=100 * waiting_s / predicted_s,
            unit="%",
            better="lower",
        ),
        *(
            harness.Row(
                metric=f"{name}: beyond the configured waiting, {side}",
                ours=1000 * (total_s - waiting_s),
                unit="ms",
                better="lower",
            )
            for side, total_s in (("model", predicted_s), ("measured", measured_s))
        ),
    ]


# -- one channel -------------------------------------------------------------------------------------------


async def measure_channel(profile: str, total: int, quick: bool) -> float:
    """The best of some rounds: rows that one second of the channel's CPU time carried."""
    with tempfile.TemporaryDirectory() as folder:
        settings = config.BrokerConfig(name="b", directory=pathlib.Path(folder))
        async with broker.Broker(settings) as running:
            rates = [
                await asyncio.to_thread(_channel_round, running.url, profile, total)
                for _ in range(2 if quick else 4)
            ]
    return max(rates)


def _channel_round(url: str, profile: str, total: int) -> float:
    """The sensors never run further ahead than the broker would hold for the channel."""
    with (
        measure.Worker(WORKER, "channel", url, channel_channel.ChannelOptions().hold_s, "c1") as channel,
        measure.Worker(WORKER, "sensors", url, MACHINES, profile) as source,
    ):
        source.hear()
        channel.hear()

        def until(figure: str, expected: int) -> dict[str, Any]:
            deadline = time.monotonic() + 60
            while True:
                channel.tell("how far?")
                counters: dict[str, Any] = channel.hear()
                if counters[figure] >= expected:
                    return counters
                if counters["reconnects"] or time.monotonic() > deadline:
                    raise errors.TimedOut(f"the channel is at {counters}, and not at {expected:,} {figure}")
                time.sleep(0.05)

        begun: dict[str, Any] = {}
        for sent in range(BLOCK, total + BLOCK, BLOCK):
            source.tell(BLOCK)
            source.hear(timeout_s=120)
            begun = begun or until("forwarded", BLOCK)  # the first block only warms it up
            until("received", sent - 2 * BLOCK)
        ended = until("forwarded", total)
        assert not ended["dropped"], ended
    rate: float = (ended["received"] - begun["received"]) / (ended["cpu_s"] - begun["cpu_s"])
    print(
        f"  channel, {profile} fleet: {total:,} reports, {rate:,.0f} a CPU second, "
        f"{ended['rss_bytes'] / 2**20:.0f} MiB"
    )
    return rate


# -- three forms -------------------------------------------------------------------------------------------


SIZES = (1, 10, 30, 100, 300, 1000)  # reports in a message
SHIPPED = channel_channel.ChannelOptions().compression
CODECS = (SHIPPED, "zstd", None)


def fit(points: Sequence[tuple[float, float, float]]) -> capacity_model.CostParameters:
    """Costs of a message and of a row from (messages, rows, CPU seconds), by least squares."""
    if len(points) < 2:
        raise errors.InvalidInput("at least two measurements with different rows per message are needed")
    products = [(m * m, m * r, r * r, m * c, r * c) for m, r, c in points]
    mm, mr, rr, mc, rc = (sum(values) for values in zip(*products, strict=True))
    determinant = mm * rr - mr * mr
    if determinant <= 1e-12 * mm * rr:
        raise errors.InvalidInput("all messages have the same number of rows: the costs cannot be separated")
    message_s = (mc * rr - rc * mr) / determinant
    row_s = (rc * mm - mc * mr) / determinant
    return capacity_model.CostParameters(message_s=max(0.0, message_s), row_s=max(0.0, row_s))


class Form(msgspec.Struct, frozen=True):
    """CPU seconds to take a message in and to write what goes on, for each of `SIZES`."""

    in_s: dict[int, float]
    out_s: dict[int, float]
    bytes_a_row: dict[str | None, float]  # by codec

    @property
    def row_s(self) -> float:
        return (self.in_s[ROWS] + self.out_s[ROWS]) / ROWS

    @property
    def costs(self) -> capacity_model.CostParameters:
        taken, written = (
            # Weighed by size, so that the small messages tell the cost of a message.
            fit([(1 / size, 1.0, seconds / size) for size, seconds in points.items()])
            for points in (self.in_s, self.out_s)
        )
        return capacity_model.CostParameters(
            message_s=taken.message_s,
            row_s=taken.row_s,
            out_message_s=written.message_s,
            out_row_s=written.row_s,
        )


Steps = tuple[Callable[[int], object], Callable[[], object]]  # take the n-th message, write what goes on
Maker = Callable[[list[messages.NodeReport], int], tuple[dict[str | None, int], Steps]]
"""From rows, and how many messages of them, to the sizes of a message by codec and the steps of a channel."""


def measure_forms(profile: str, sizes: Sequence[int], *, rounds: int) -> dict[str, Form]:
    rows = monitor_rows.reports_(ROWS * 11 // 10, profile)[:ROWS]  # some are silent
    makers: dict[str, Maker] = {"arrow": _arrow, "json": _json, "xml": _xml}
    forms = {}
    for name, make in makers.items():
        in_s, out_s, size = {}, {}, dict[str | None, float]()
        for count in sizes:
            turns = max(rounds, min(200, rounds * ROWS // count // 10))
            total, (take, write) = make(rows[:count], turns)
            best_in, best_out = math.inf, math.inf
            for turn in range(turns):
                start = time.process_time()
                take(turn)
                middle = time.process_time()
                write()
                best_in = min(best_in, middle - start)
                best_out = min(best_out, time.process_time() - middle)
            in_s[count], out_s[count] = best_in, best_out
            size = {codec: length / count for codec, length in total.items()}
        forms[name] = Form(in_s, out_s, size)
    return forms


def _compressed(data: bytes) -> dict[str | None, int]:
    return {codec: len(pa.compress(data, codec, asbytes=True) if codec else data) for codec in CODECS}


def _arrow(rows: list[messages.NodeReport], turns: int) -> tuple[dict[str | None, int], Steps]:
    """Compressed as channels are shipped, both ways."""
    channel = aggregator.Aggregator("c", 1, [UP])
    now_ms = rows[0].at_ms

    def message(turn: int) -> bytes:
        numbered = [msgspec.structs.replace(row, sequence=turn + 1) for row in rows]
        facts = columns.BatchInfo(channel="x", sequence=turn)
        return columns.encode(columns.to_batch(numbered), facts, compression=SHIPPED)

    made = [message(turn) for turn in range(turns)]

    def take(turn: int) -> None:
        channel.add_batch("x", made[turn], now_ms)

    def write() -> object:
        return [forward.encode(SHIPPED) for forward in channel.flush(now_ms)]

    batch, facts = columns.to_batch(rows), columns.BatchInfo(channel="x")
    sizes = {codec: len(columns.encode(batch, facts, compression=codec)) for codec in CODECS}
    return sizes, (take, write)


def _json(rows: list[messages.NodeReport], turns: int) -> tuple[dict[str | None, int], Steps]:
    data = msgspec.json.encode(rows)
    decoder = msgspec.json.Decoder(list[messages.NodeReport])
    once = _Once()
    held: list[messages.NodeReport] = []

    def take(turn: int) -> object:
        held[:] = [row for row in decoder.decode(data) if once.sees(row, turn)]
        return held

    return _compressed(data), (take, lambda: msgspec.json.encode(held))


def _xml(rows: list[messages.NodeReport], turns: int) -> tuple[dict[str | None, int], Steps]:
    data = report_xml.encode(
        columns.GroupReport(group="g", from_ms=0, to_ms=1, machines=len(rows), nodes=tuple(rows))
    )

    once = _Once()
    held: list[messages.NodeReport] = []

    def take(turn: int) -> object:
        held[:] = [row for row in monitor_xml.read_xml(data) if once.sees(row, turn)]
        return held

    return _compressed(data), (take, lambda: monitor_xml.write_xml(held))


class _Once:
    """The least that counts a report once."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def sees(self, row: messages.NodeReport, turn: int) -> bool:
        name = (row.boot, turn)
        if self._seen.get(row.machine) == name:
            return False
        self._seen[row.machine] = name
        return True


# -- the model ---------------------------------------------------------------------------------------------


async def _propagation(quick: bool) -> tuple[float, float]:
    """Worst case by the model, and the oldest report measured, through two levels into the stream."""
    machines, period_s = 1000, 2.0
    with tempfile.TemporaryDirectory() as folder:
        settings = config.BrokerConfig(name="b", directory=pathlib.Path(folder))
        async with broker.Broker(settings) as running:

            async def connect(name: str) -> bus_client.NatsBus:
                return await bus_client.connect([running.url], identity=name, audit_s=0)

            below = interpreters.ForwardTarget("up", ("top",))
            plan = fleet.FleetPlan(machines=machines, period_s=period_s, prefix="fleet", rows_per_message=10)
            async with (
                await connect("top") as top_bus,
                await connect("leaf") as leaf_bus,
                await connect("fleet") as fleet_bus,
                channel_channel.Channel(top_bus, channel_channel.ChannelOptions(hold_s=HOLDS_S[1])),
                channel_channel.Channel(
                    leaf_bus, channel_channel.ChannelOptions(hold_s=HOLDS_S[0], subscriptions=(below,))
                ) as leaf,
            ):
                await eventually(lambda: leaf._parents["up"].choose(time.monotonic()))
                player = playback.FleetPlayer(
                    fleet_bus, fleet.VirtualFleet(plan), form="reports", channel="leaf"
                )
                await player.run(ticks=5 if quick else 20)
                await asyncio.sleep(sum(HOLDS_S) + 0.5)
                recent = await client.recent(fleet_bus, window_s=3600)
    ages_s = [
        reports.stored_at_ms / 1000 - at_us / 1e6
        for reports in recent
        for at_us in reports.batch.column("reported_at").cast("int64").to_pylist()
    ]
    costs = capacity_plan.MeasuredCosts()
    tree = capacity_model.Hierarchy(
        "measured",
        period_s,
        (
            capacity_model.HierarchyLevel(machines, HOLDS_S[0], costs.channel),
            capacity_model.HierarchyLevel(1, HOLDS_S[1], costs.inner),
        ),
    )
    levels = capacity_model.figures(tree).levels
    # From the report's making, so without the sensor's period; into the stream, so with the top's hold.
    predicted_s = capacity_model.propagation_s(
        [0.0, *HOLDS_S], [*(level.in_s for level in levels), 0.0], [level.out_s for level in levels]
    )
    return predicted_s, max(ages_s)


async def _whole_way(quick: bool) -> capacity_check.CapacityCheck | None:
    """Sensors, two levels of channels, the stream, Spark: as `muster capacity --check` sees it."""
    machines, period_s = 2000, 2.0
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        async with broker.Broker(config.BrokerConfig(name="b", directory=place / "broker")) as running:

            async def connect(name: str) -> bus_client.NatsBus:
                return await bus_client.connect([running.url], identity=name, audit_s=0)

            below = interpreters.ForwardTarget("up", ("top",))
            plan = fleet.FleetPlan(machines=machines, period_s=period_s, prefix="fleet", rows_per_message=20)
            async with (
                await connect("top") as top_bus,
                await connect("leaf") as leaf_bus,
                await connect("fleet") as fleet_bus,
                channel_channel.Channel(top_bus, channel_channel.ChannelOptions(hold_s=HOLDS_S[1])),
                channel_channel.Channel(
                    leaf_bus, channel_channel.ChannelOptions(hold_s=HOLDS_S[0], subscriptions=(below,))
                ),
            ):
                with _spark(running.url, place) as alive:
                    player = playback.FleetPlayer(
                        fleet_bus, fleet.VirtualFleet(plan), form="reports", channel="leaf"
                    )
                    playing = asyncio.create_task(player.run())
                    try:
                        return await _until_steady(fleet_bus, 4 if quick else 12, alive)
                    finally:
                        playing.cancel()
                        await asyncio.gather(playing, return_exceptions=True)


async def _until_steady(
    bus: bus_client.NatsBus, batches: int, alive: Callable[[], bool]
) -> capacity_check.CapacityCheck | None:
    """What is measured over so many batches; None where Spark does not run, or not quickly enough."""
    deadline = time.monotonic() + 60 + 3 * batches * TRIGGER_S
    while time.monotonic() < deadline and alive():
        await asyncio.sleep(2.0)
        with contextlib.suppress(errors.NotFound, errors.Unavailable):
            check = await capacity_check.check(bus, window_s=batches * TRIGGER_S)
            if check.batches >= batches:
                return check
    return None


@contextlib.contextmanager
def _spark(url: str, place: pathlib.Path) -> Iterator[Callable[[], bool]]:
    with (place / "pipeline.log").open("ab") as log:
        process = subprocess.Popen(
            measure.pipeline_command(place, url, f"pipeline.trigger_s={TRIGGER_S}"),
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(measure.ROOT / "src")},
            start_new_session=True,
        )
    try:
        yield lambda: process.poll() is None
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _whole_rows(check: capacity_check.CapacityCheck | None) -> list[harness.Row]:
    if check is None:
        print("  the whole way: not measured, since Spark did not run, or was not steady in time")
        return []
    held_s = sum(took_s for name, took_s in check.stages.items() if name != "batch")
    print("  the whole way:", ", ".join(f"{name} {took:.2f} s" for name, took in check.stages.items()))
    return [
        harness.Row(
            metric="whole way, two levels and Spark: propagation, longest",
            ours=check.measured_s,
            unit="s",
            better="lower",
            peer=check.predicted_s,
            peer_name="the model's worst case",
        ),
        harness.Row(
            metric="whole way: model beside measured",
            ours=100 * abs(check.predicted_s / check.measured_s - 1),
            unit="% apart",
            better="lower",
            goal=20,
        ),
        *_waiting_rows("whole way", held_s, check.predicted_s, check.measured_s),
        harness.Row(
            metric="whole way: p99, beside holding times, trigger and 5 s",
            ours=check.p99_s,
            unit="s",
            better="lower",
            goal=held_s + 5.0,
            samples=check.rows,
        ),
    ]


def _hierarchies(forms: dict[str, Form], channel_s: float) -> list[harness.Row]:
    """The paper's table 2 with measured costs: how far each goes with XML, and with ours."""
    return [
        harness.Row(
            metric=f"capacity by the model: {ours.name}",
            ours=capacity_model.capacity(ours),
            unit="machines",
            better="higher",
            peer=capacity_model.capacity(as_xml),
            peer_name="XML, lxml",
        )
        for ours, as_xml in zip(
            trees_of(forms, channel_s), capacity_model.table_2(forms["xml"].costs), strict=True
        )
    ]


def trees_of(forms: dict[str, Form], channel_s: float) -> tuple[capacity_model.Hierarchy, ...]:
    """Single rows from the sensors, Arrow between channels."""
    return capacity_model.table_2(
        forms["arrow"].costs, first=capacity_model.CostParameters(message_s=1 / channel_s, row_s=0.0)
    )
