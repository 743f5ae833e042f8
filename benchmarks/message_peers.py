"""Real JMS clients through our gateway, beside Artemis and ActiveMQ, in turns.

The brokers and the clients are Java, from Maven (`message_java`), compiled once into a cache: Artemis with
Qpid JMS over AMQP, as our gateway; ActiveMQ 5.17 with its own client over OpenWire.  All three keep
persistent messages on disk and sync them before they acknowledge them; non-persistent ones stay in memory.
Artemis has its native journal where libaio is there: the load of a row names what it used.  Every JVM is
warmed up before anything is measured.

Transit is measured at every subscriber.  The subscribers share connections evenly, and no subscriber has a
place of its own.  Samples are messages; each has as many delays as there are subscribers.  5 messages a
second are not measured: 1,000 samples would take 200 s for each provider and size.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import time
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import etcd, harness, measure
from muster.core import errors

SOURCE = pathlib.Path(__file__).parent / "message_java"
CONNECTIONS, SUBSCRIBERS = 10, 100
STORED = ((16, 1), (16, 16), (64, 1), (64, 16))  # senders and queues
RECEIVED = "sent and received"
STORED_GOALS = {"artemis": 0.7, "activemq": 1.0}
CLIENT_LIMIT = 1_000  # messages a second
BROKER_MEMORY = ("-Xms512m", "-Xmx2g")
CLIENT_MEMORY = ("-Xmx1g",)

Delays = npt.NDArray[np.int32]  # microseconds: a row for each subscriber, a column for each message


@dataclass(frozen=True, slots=True)
class Cell:
    """Messages of one size at one rate."""

    size: int
    rate: int  # a second
    seconds: int  # in all moments together

    @property
    def label(self) -> str:
        """At the highest rate, one process has as many deliveries to receive as it can."""
        limit = " (limited by the client's CPU)" if self.rate >= CLIENT_LIMIT else ""
        return f"{self.size} B at {self.rate}/s to {SUBSCRIBERS} subscribers{limit}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often each case is measured."""

    cells: tuple[Cell, ...]
    moments: int  # into which the time of a cell is divided, the sides taking turns
    warm_up_s: float  # for each side: as quickly as it goes, one subscriber
    subscribed_warm_up_s: int  # for each side: all subscribers, 200 messages a second
    rounds: int  # of which the best counts, for every side
    messages: int
    stored: int


FULL = Plan(
    cells=(
        *(Cell(size, 25, 40) for size in (100, 2000, 6000)),
        Cell(100, 100, 20),
        Cell(100, 1000, 6),
    ),
    moments=4,
    warm_up_s=20,
    subscribed_warm_up_s=5,
    rounds=5,
    messages=20_000,
    stored=8_000,
)
QUICK = Plan(
    cells=(Cell(6000, 25, 2), Cell(100, 100, 3), Cell(100, 1000, 1)),
    moments=1,
    warm_up_s=4,
    subscribed_warm_up_s=2,
    rounds=2,
    messages=5_000,
    stored=1_600,
)


def classpath() -> str | None:
    """The compiled project, made if it is not there; None, and why is printed, where that cannot be."""
    digest = hashlib.sha256()
    for file in sorted(SOURCE.rglob("*.*")):
        if "target" not in file.parts:
            digest.update(file.read_bytes())
    folder = etcd.CACHE / f"message-{digest.hexdigest()[:12]}"
    if not (folder / "classpath").exists():
        if shutil.which("mvn") is None or shutil.which("java") is None:
            print("no JMS peers to compare with: Maven or Java is not installed")
            return None
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("target"))
        try:
            subprocess.run(
                ["mvn", "-q", "-B", "compile", "dependency:build-classpath", "-Dmdep.outputFile=classpath"],
                cwd=folder,
                check=True,
                capture_output=True,
                timeout=300,
            )
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"no JMS peers to compare with: Maven could not build them: {error}")
            return None
        _add_native(folder)
    return f"{folder}/target/classes:{(folder / 'classpath').read_text().strip()}"


NATIVE = "native"


def _add_native(folder: pathlib.Path) -> None:
    """What Artemis' native journal needs: its own library, from its package, and libaio."""
    (folder / NATIVE).mkdir()
    (package,) = (
        path for path in (folder / "classpath").read_text().strip().split(":") if "artemis-native" in path
    )
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if f"linux-{platform.machine()}/" in name and name.endswith(".so"):
                (folder / NATIVE / pathlib.Path(name).name).write_bytes(archive.read(name))
    if ctypes.util.find_library("aio") is None:
        for package in ("libaio1", "libaio1t64"):
            if etcd.unpack_package(package, folder / "debian"):
                library = next((folder / "debian").rglob("libaio.so.1*"))
                shutil.copy(library, folder / NATIVE / "libaio.so.1")
                return
        print("Artemis has no native journal: libaio is not installed and not in the package sources")


class Java(measure.Worker):
    """A class of the project in a process of its own; it reads lines and prints JSON."""

    def __init__(self, path: str, memory: Iterable[str], *arguments: str) -> None:
        self.name = " ".join(arguments)
        native = f"{pathlib.Path(path.partition(':')[0]).parents[1]}/{NATIVE}"
        self._process = subprocess.Popen(
            ["java", *memory, f"-Djava.library.path={native}", "-cp", path, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LD_LIBRARY_PATH": native},
        )

    def tell(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{message}\n".encode())
        self._process.stdin.flush()

    def ask(self, message: str) -> Any:
        self.tell(message)
        return self.hear(timeout_s=90)


def cpu_seconds(*pids: int) -> float:
    """What these processes have used so far."""
    total = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / 100


@dataclass(slots=True)
class Side:
    load: Java
    pids: tuple[int, ...]  # of the broker, whose CPU time counts
    settings: str  # how persistent messages are stored

    def run(self, count: int, size: int, rate: int = 0, file: str = "-") -> float:
        """Publish so many to all subscribers; seconds from the first send to the last arrival."""
        answer = self._ask(f"run {count} {size} {rate} {file}", count if rate == 0 else None)
        return float(answer["took_s"])

    def store(self, count: int, size: int, senders: int, queues: int) -> dict[str, float]:
        """Seconds to the last acknowledgement, and to the last arrival."""
        answer = self._ask(f"store {count} {size} {senders} {queues}", count)
        return {"sends acknowledged": answer["sent_s"], RECEIVED: answer["took_s"]}

    def _ask(self, command: str, expected: int | None) -> Any:
        answer = self.load.ask(command)
        if expected is not None and answer["received"] != expected:
            raise errors.InvariantViolation(
                f"{answer['received']} of {expected} messages arrived: {self.load.name}"
            )
        return answer


@contextlib.contextmanager
def sides(path: str, gateway_port: int, gateway_pids: tuple[int, ...]) -> Iterator[dict[str, Side]]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-message-peers"))
        brokers = {
            name: stack.enter_context(Java(path, BROKER_MEMORY, "Peer", name, f"{folder}/{name}"))
            for name in ("artemis", "activemq")
        }
        settings = "nats-server stream, sync_interval always, one replica"
        made = {"ours": ("qpid", f"amqp://127.0.0.1:{gateway_port}", gateway_pids, settings)}
        for name, scheme, client in (("artemis", "amqp", "qpid"), ("activemq", "tcp", "openwire")):
            answer = brokers[name].hear()
            url = f"{scheme}://127.0.0.1:{answer['port']}"
            made[name] = (client, url, (brokers[name].pid,), answer["settings"])
        all_sides = {
            name: Side(stack.enter_context(Java(path, CLIENT_MEMORY, "Load", client, url)), pids, settings)
            for name, (client, url, pids, settings) in made.items()
        }
        for side in all_sides.values():
            side.load.hear()
        yield all_sides


def rows(quick: bool, gateway_port: int, gateway_pids: tuple[int, ...]) -> list[harness.Row]:
    path = classpath()
    if path is None:
        return []
    plan = QUICK if quick else FULL
    with sides(path, gateway_port, gateway_pids) as all_sides:
        table = harness.under(
            f"one publisher, one subscriber, a connection each; topic, non-persistent, AUTO_ACKNOWLEDGE; "
            f"{plan.messages:,} messages as quickly as possible; best of {plan.rounds} rounds of each side; "
            f"JVMs warmed up for {plan.warm_up_s:g} s each; {_CLIENTS}",
            _throughput(all_sides, plan),
        )
        stored = "; ".join(f"{_NAMES[name]}: {side.settings}" for name, side in all_sides.items())
        table += harness.under(
            f"each sender on a connection of its own, waiting for each acknowledgement; a consumer for each "
            f"queue, which receives meanwhile; PERSISTENT, AUTO_ACKNOWLEDGE; {plan.stored:,} messages; "
            f"best of {plan.rounds} rounds of each side; {_CLIENTS}; {stored}",
            _persistent(all_sides, plan),
        )
        delays, clients_cpu, received_s = _transit(all_sides, plan)
    if not quick:
        _draw(delays, received_s)
    load = (
        f"{SUBSCRIBERS} subscribers on {CONNECTIONS} connections, evenly; the publisher on its own; topic, "
        f"non-persistent, AUTO_ACKNOWLEDGE; every subscriber measured; the sides took {plan.moments} turns; "
        f"a sample is a message with its {SUBSCRIBERS} delays; {_CLIENTS}"
    )
    for cell, by_side in delays.items():
        of = f"{cell.label}, JMS"
        samples = min(times.shape[1] for times in by_side.values())
        table += harness.under(
            load,
            [
                *_compared(f"transit p50, {of}", "µs", "lower", _each(by_side, p50), _AS_ARTEMIS, samples),
                *_compared(f"transit p99, {of}", "µs", "lower", _each(by_side, p99), samples=samples),
                *_compared(
                    f"transit standard deviation, {of}",
                    "µs",
                    "lower",
                    _each(by_side, deviation),
                    samples=samples,
                ),
                *_compared(f"received, {of}", "messages/s", "higher", received_s[cell], samples=samples),
                *_compared(
                    f"slowest subscriber's transit p99, {of}",
                    "µs",
                    "lower",
                    _each(by_side, slowest_p99),
                    samples=samples,
                ),
                *_compared(f"CPU of the client, {of}", "% of a core", "lower", clients_cpu[cell]),
            ],
        )
    return table


def p50(delays: Delays) -> float:
    return float(np.nanpercentile(delays, 50, method="inverted_cdf"))


def p99(delays: Delays) -> float:
    return float(np.nanpercentile(delays, 99, method="inverted_cdf"))


def deviation(delays: Delays) -> float:
    return float(np.nanstd(delays))


def slowest_p99(delays: Delays) -> float:
    """Of the subscriber whose p99 is the highest: far above the common p99 where some are served last."""
    return float(np.nanpercentile(delays, 99, axis=1, method="inverted_cdf").max())


def _each(by_side: dict[str, Delays], function: Any) -> dict[str, float]:
    return {name: function(delays) for name, delays in by_side.items()}


_AS_ARTEMIS = {"artemis": 1.0}
_CLIENTS = "Muster and Artemis with Qpid JMS over AMQP, ActiveMQ with its own client over OpenWire"
_NAMES = {"ours": "Muster, AMQP", "artemis": "Artemis, AMQP", "activemq": "ActiveMQ, OpenWire"}


def _compared(
    metric: str,
    unit: str,
    better: measure.Better,
    figures: dict[str, float],
    goals: Mapping[str, float] = types.MappingProxyType({}),
    samples: int | None = None,
) -> Iterator[harness.Row]:
    for peer in ("artemis", "activemq"):
        yield harness.Row(
            metric=metric,
            ours=figures["ours"],
            unit=unit,
            better=better,
            peer=figures[peer],
            peer_name=_NAMES[peer],
            goal=goals.get(peer),
            goal_is="ratio",
            samples=samples,
        )


def _turns(all_sides: dict[str, Side], turn: int) -> Iterator[tuple[str, Side]]:
    """Each turn in the other order."""
    yield from sorted(all_sides.items(), reverse=turn % 2 == 1)


def _throughput(all_sides: dict[str, Side], plan: Plan) -> Iterator[harness.Row]:
    rates: dict[str, list[float]] = {name: [] for name in all_sides}
    cpu_us: dict[str, list[float]] = {name: [] for name in all_sides}
    for side in all_sides.values():
        side.load.ask("subscribe 1 1")
        until = time.monotonic() + plan.warm_up_s
        while time.monotonic() < until:
            side.run(plan.messages, 512)
    for turn in range(plan.rounds):
        for name, side in _turns(all_sides, turn):
            before = cpu_seconds(*side.pids)
            rates[name].append(plan.messages / side.run(plan.messages, 512))
            cpu_us[name].append(1e6 * (cpu_seconds(*side.pids) - before) / plan.messages)
    best = {name: max(rate) for name, rate in rates.items()}
    yield from _compared("512 B through one connection, JMS", "/s", "higher", best, _AS_ARTEMIS)
    least = {name: min(samples) for name, samples in cpu_us.items()}
    yield from _compared("broker's CPU a message, JMS", "µs", "lower", least)


def _persistent(all_sides: dict[str, Side], plan: Plan) -> Iterator[harness.Row]:
    for senders, queues in STORED:
        for what, best in _stored(all_sides, plan, senders, queues).items():
            goals = STORED_GOALS if what == RECEIVED else {}
            yield from _compared(_stored_metric(what, senders, queues), "/s", "higher", best, goals)


def _stored_metric(what: str, senders: int, queues: int) -> str:
    return f"512 B persistent, {what}, {senders} senders, {queues} queue{'s'[: queues > 1]}, JMS"


def _stored(all_sides: dict[str, Side], plan: Plan, senders: int, queues: int) -> dict[str, dict[str, float]]:
    """The best rate of each side, to the last acknowledgement and to the last arrival."""
    rates: dict[str, dict[str, float]] = {}
    for turn in range(1 + plan.rounds):
        for name, side in _turns(all_sides, turn):
            for what, took_s in side.store(plan.stored, 512, senders, queues).items():
                if turn:  # the first warms up
                    best = rates.setdefault(what, {})
                    best[name] = max(best.get(name, 0.0), plan.stored / took_s)
    return rates


def replicated_rows(quick: bool, gateway_port: int, replicas: int) -> list[harness.Row]:
    """Ours alone: the peers replicate in other ways."""
    path = classpath()
    if path is None:
        return []
    plan = QUICK if quick else FULL
    with Java(path, CLIENT_MEMORY, "Load", "qpid", f"amqp://127.0.0.1:{gateway_port}") as load:
        load.hear()
        sides = {"ours": Side(load, (), "")}
        rates = {shape: _stored(sides, plan, *shape) for shape in STORED}
    return harness.under(
        f"as beside the peers, with {replicas} brokers and as many replicas; {plan.stored:,} messages; "
        f"best of {plan.rounds} rounds; Qpid JMS over AMQP",
        [
            harness.Row(
                metric=f"{_stored_metric(what, *shape)}, {replicas} brokers",
                ours=best["ours"],
                unit="/s",
                better="higher",
            )
            for shape, by_kind in rates.items()
            for what, best in by_kind.items()
        ],
    )


def _transit(
    all_sides: dict[str, Side], plan: Plan
) -> tuple[dict[Cell, dict[str, Delays]], dict[Cell, dict[str, float]], dict[Cell, dict[str, float]]]:
    """By cell and side: every delay of every subscriber, how much of a core the client used, and the messages
    that all subscribers received in a second.
    """
    for side in all_sides.values():
        side.load.ask(f"subscribe {CONNECTIONS} {SUBSCRIBERS}")
        side.run(200 * plan.subscribed_warm_up_s, 100, 200)
    moments: dict[Cell, dict[str, list[Delays]]] = {
        cell: {name: [] for name in all_sides} for cell in plan.cells
    }
    cpu_s = {cell: dict.fromkeys(all_sides, 0.0) for cell in plan.cells}
    took_s = {cell: dict.fromkeys(all_sides, 0.0) for cell in plan.cells}
    with tempfile.TemporaryDirectory(prefix="bench-message-delays") as folder:
        file = pathlib.Path(folder) / "delays"
        for moment in range(plan.moments):
            for turn, cell in enumerate(plan.cells, moment):
                count = cell.rate * cell.seconds // plan.moments
                for name, side in _turns(all_sides, turn):
                    before_s = cpu_seconds(side.load.pid)
                    took_s[cell][name] += side.run(count, cell.size, cell.rate, str(file))
                    cpu_s[cell][name] += cpu_seconds(side.load.pid) - before_s
                    moments[cell][name].append(read_delays(file, SUBSCRIBERS))
    delays = {
        cell: {name: np.concatenate(samples, axis=1) for name, samples in by_side.items()}
        for cell, by_side in moments.items()
    }
    cpu = {
        cell: {name: 100 * used_s / took_s[cell][name] for name, used_s in by_side.items()}
        for cell, by_side in cpu_s.items()
    }
    received_s = {
        cell: {name: delays[cell][name].size / used_s for name, used_s in by_side.items()}
        for cell, by_side in took_s.items()
    }
    return delays, cpu, received_s


def read_delays(file: pathlib.Path, subscribers: int) -> Delays:
    delays = np.fromfile(file, dtype="<i4").reshape(subscribers, -1)
    if lost := int((delays < 0).sum()):
        raise errors.InvariantViolation(f"{lost} of {delays.size} deliveries did not arrive")
    return delays


def _draw(delays: dict[Cell, dict[str, Delays]], received_s: dict[Cell, dict[str, float]]) -> None:
    """The paper's figures 3 to 10, as far as its text gives them: mean transit delay and deviation by payload
    and rate, and the throughput at the receivers by the rate of small payloads.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    panels = (
        (axes[0], [cell for cell in delays if cell.rate == 25], "bytes, at 25 messages/s"),
        (axes[1], [cell for cell in delays if cell.size == 100], "messages/s of 100 bytes"),
    )
    for axis, cells, label in panels:
        for name, title in _NAMES.items():
            values = [delays[cell][name] / 1000 for cell in cells]
            axis.errorbar(
                [cell.size if axis is axes[0] else cell.rate for cell in cells],
                [samples.mean() for samples in values],
                [samples.std() for samples in values],
                label=title,
                marker="o",
                capsize=3,
            )
        axis.set_xlabel(label, fontsize=8)
        axis.set_ylabel("transit delay, ms (mean ± deviation)", fontsize=8)
        axis.set_ylim(bottom=0)
    axes[1].set_xscale("log")
    small = [cell for cell in delays if cell.size == 100]
    for name, title in _NAMES.items():
        axes[2].plot(
            [cell.rate for cell in small], [received_s[cell][name] for cell in small], "o-", label=title
        )
    axes[2].set(xscale="log", yscale="log")
    axes[2].set_xlabel("messages/s of 100 bytes", fontsize=8)
    axes[2].set_ylabel(f"received a second by {SUBSCRIBERS} subscribers", fontsize=8)
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(harness.RESULTS / "message-transit.png", dpi=110)
    plt.close(figure)
