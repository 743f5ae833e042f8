"""The paper's measurement with real JMS clients: our gateway beside Artemis and ActiveMQ, in turns.

The brokers and the clients are Java, from Maven (`message_java`), compiled once into a cache: Artemis with
Qpid JMS over AMQP, as our gateway; ActiveMQ 5.17 with its own client over OpenWire.  Both run in memory.
Debian's ActiveMQ has no AMQP and needs to be installed, so the one of the same series from Maven is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import etcd, harness, measure

SOURCE = pathlib.Path(__file__).parent / "message_java"
SLOW = tuple((size, 25) for size in (100, 2000, 6000))  # bytes, messages a second
FAST = ((100, 100), (100, 1000))
DELAYS_MAX = 500
QUICK = ((100, 25), (6000, 25), (100, 1000))


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
    return f"{folder}/target/classes:{(folder / 'classpath').read_text().strip()}"


class Java(measure.Worker):
    """A class of the project in a process of its own; it is told lines and says JSON."""

    def __init__(self, path: str, *arguments: str) -> None:
        self.name = " ".join(arguments)
        self._process = subprocess.Popen(
            ["java", "-XX:+UseSerialGC", "-Xmx1g", "-cp", path, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
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


@contextlib.contextmanager
def sides(path: str, gateway_port: int, gateway_pids: tuple[int, ...]) -> Iterator[dict[str, Side]]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-message-peers"))
        found: dict[str, Side] = {}
        brokers = {}
        for name in ("artemis", "activemq"):
            brokers[name] = stack.enter_context(Java(path, "Peer", name, f"{folder}/{name}"))
        urls = {"ours": ("qpid", f"amqp://127.0.0.1:{gateway_port}", gateway_pids)}
        for name, scheme, client in (("artemis", "amqp", "qpid"), ("activemq", "tcp", "openwire")):
            port = brokers[name].hear()["port"]
            urls[name] = (client, f"{scheme}://127.0.0.1:{port}", (brokers[name].pid,))
        for name, (client, url, pids) in urls.items():
            found[name] = Side(stack.enter_context(Java(path, "Load", client, url)), pids)
        for side in found.values():
            side.load.hear()
        yield found


def rows(quick: bool, gateway_port: int, gateway_pids: tuple[int, ...]) -> list[harness.Row]:
    path = classpath()
    if path is None:
        return []
    with sides(path, gateway_port, gateway_pids) as all_sides:
        found = [*_throughput(all_sides, quick)]
        for side in all_sides.values():
            side.load.tell("subscribe 10 100")
        for side in all_sides.values():
            side.load.hear()
        delays = _delays(all_sides, quick)
    if not quick:
        _draw(delays)
    for (size, rate), by_side in delays.items():
        what = f"{size} B at {rate}/s to 101 subscribers, Qpid JMS"
        found += [
            *_compared(f"transit p50, {what}", "µs", "lower", _each(by_side, _p50), goal=True),
            *_compared(f"transit mean, {what}", "µs", "lower", _each(by_side, statistics.fmean)),
            *_compared(f"transit deviation, {what}", "µs", "lower", _each(by_side, statistics.pstdev)),
        ]
    return found


def _p50(delays_us: list[float]) -> float:
    return measure.percentile(delays_us, 50)


def _each(by_side: dict[str, list[float]], function: Any) -> dict[str, float]:
    return {name: function(delays) for name, delays in by_side.items()}


_NAMES = {"artemis": "Artemis, AMQP", "activemq": "ActiveMQ, OpenWire"}


def _compared(
    metric: str, unit: str, better: measure.Better, figures: dict[str, float], goal: bool = False
) -> Iterator[harness.Row]:
    for peer in _NAMES:
        yield harness.Row(
            metric=metric,
            ours=figures["ours"],
            unit=unit,
            better=better,
            peer=figures[peer],
            peer_name=_NAMES[peer],
            goal=1.0 if goal and peer == "artemis" else None,
            goal_is="ratio",
        )


def _throughput(all_sides: dict[str, Side], quick: bool) -> Iterator[harness.Row]:
    """One publisher and one subscriber, as quickly as it goes."""
    count = 3_000 if quick else 20_000
    rates: dict[str, list[float]] = {name: [] for name in all_sides}
    cpu_us: dict[str, list[float]] = {name: [] for name in all_sides}
    for side in all_sides.values():  # the Java side compiles itself first
        side.load.ask(f"run {count} 512 0")
    for turn in range(1 if quick else 3):
        for name, side in sorted(all_sides.items(), reverse=turn % 2 == 1):
            before = cpu_seconds(*side.pids)
            answer = side.load.ask(f"run {count} 512 0")
            rates[name].append(len(answer["delays_us"]) / answer["took_s"])
            cpu_us[name].append(1e6 * (cpu_seconds(*side.pids) - before) / count)
    best = {name: max(found) for name, found in rates.items()}
    yield from _compared("512 B through one connection, Qpid JMS", "/s", "higher", best, goal=True)
    least = {name: min(found) for name, found in cpu_us.items()}
    yield from _compared("broker's CPU a message, Qpid JMS", "µs", "lower", least)


def _delays(all_sides: dict[str, Side], quick: bool) -> dict[tuple[int, int], dict[str, list[float]]]:
    """The transit delays of the measuring subscriber, by size and rate: each side's best moment of a few."""
    cells = QUICK if quick else SLOW + FAST
    moments: dict[tuple[int, int], dict[str, list[list[float]]]] = {
        cell: {name: [] for name in all_sides} for cell in cells
    }
    for moment in range(1 if quick else 3):
        for turn, (size, rate) in enumerate(cells, moment):
            # Each goes to 101 subscribers: what two cores of Java clients take in a few seconds.
            count = min(max(5, rate * (1 if quick else 2)), DELAYS_MAX)
            for name, side in sorted(all_sides.items(), reverse=turn % 2 == 1):
                moments[size, rate][name].append(side.load.ask(f"run {count} {size} {rate}")["delays_us"])
    return {
        cell: {name: min(found, key=_p50) for name, found in by_side.items()}
        for cell, by_side in moments.items()
    }


def _draw(delays: dict[tuple[int, int], dict[str, list[float]]]) -> None:
    """The paper's figures 3 to 10, as far as its text tells them: mean transit delay and deviation."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    panels = ((axes[0], 25, SLOW), (axes[1], None, FAST))
    labels = {"ours": "Muster, AMQP", **_NAMES}
    for axis, rate, cells in panels:
        chosen = [cell for cell in cells if rate is None or cell[1] == rate]
        for name, label in labels.items():
            values = [delays[cell][name] for cell in chosen]
            places = [size if rate else each for size, each in chosen]
            axis.errorbar(
                places,
                [statistics.fmean(found) / 1000 for found in values],
                [statistics.pstdev(found) / 1000 for found in values],
                label=label,
                marker="o",
                capsize=3,
            )
        axis.set_xlabel(f"bytes, at {rate} messages/s" if rate else "messages/s of 100 bytes", fontsize=8)
        axis.set_ylabel("transit delay, ms (mean ± deviation)", fontsize=8)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(harness.RESULTS / "message-transit.png", dpi=110)
    plt.close(figure)
