"""One seed: start a domain, trouble it, let it recover, and judge what happened."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Protocol

from muster.core.telemetry import log
from tests.sim import domain as domain_
from tests.sim import entropy, history, loop, nemesis, process
from tests.sim.checkers import contexts as context_checker
from tests.sim.checkers import events as event_checker
from tests.sim.checkers import messages as message_checker
from tests.sim.checkers import reports as report_checker
from tests.sim.checkers import resources as resource_checker
from tests.sim.parts import contexts, events, messages, reports, resources

SETTLE_S = 120.0
START_S = 5.0  # until the services have started, before the first fault


class Part(Protocol):
    def missing(self) -> str | None:
        """What is not restored yet after the end of the faults."""

    async def finish(self) -> None:
        """Add to the history what can be read only at the end."""


PARTS: dict[str, Callable[[domain_.Domain], Part]] = {
    "contexts": contexts.ContextPart,
    "resources": resources.ResourcePart,
    "messages": messages.MessagePart,
    "events": events.EventPart,
    "reports": reports.ReportPart,
}
CHECKERS: dict[str, Callable[[history.History], list[str]]] = {
    "contexts": context_checker.check,
    "resources": resource_checker.check,
    "messages": message_checker.check,
    "events": event_checker.check,
    "reports": report_checker.check,
}


@dataclasses.dataclass(slots=True)
class Verdict:
    seed: int
    violations: list[str]
    history: history.History
    simulated_s: float
    hops: int


def run(seed: int, *, trouble_s: float | None = None, verbose: bool = False, only: str = "") -> Verdict:
    story = history.History(verbose=verbose)
    gc.collect()
    gc.disable()  # the end of garbage must not depend on the runs before
    running = loop.SimulatedLoop()
    asyncio.set_event_loop(running)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="muster-sim-") as folder,
            entropy.seeded(seed),
            _logging(story, verbose),
        ):
            return running.run_until_complete(_simulate(seed, pathlib.Path(folder), story, trouble_s, only))
    finally:
        running.power_off()
        asyncio.set_event_loop(None)
        gc.enable()


async def _simulate(
    seed: int, folder: pathlib.Path, story: history.History, trouble_s: float | None, only: str
) -> Verdict:
    running = asyncio.get_running_loop()
    assert isinstance(running, loop.SimulatedLoop)
    domain = domain_.Domain(seed, folder, story)
    chance = domain.chance("run")
    names = _chosen(only) if only else [name for name in PARTS if chance.random() < 0.6] or list(PARTS)
    parts = {name: PARTS[name](domain) for name in names}
    duration_s = trouble_s or chance.choice([20.0, 40.0, 80.0])
    story.note("run", f"seed {seed}: {names} for {duration_s:g} s")
    domain.start()
    await asyncio.sleep(START_S)
    enemy = nemesis.Nemesis(domain)
    enemy.begin()
    attack = asyncio.create_task(enemy.run())
    await asyncio.sleep(duration_s)
    attack.cancel()
    enemy.end()
    domain.calm.set()
    violations = await _recover(parts, story)
    if not violations:
        for part in parts.values():
            await part.finish()
    for name in names:
        violations += CHECKERS[name](story)
    violations += [f"{failure.actor} failed: {failure.facts['error']}" for failure in story.of("failure")]
    violations += running.failures
    return Verdict(seed, violations, story, running.time(), domain.net.hops)


def _chosen(only: str) -> list[str]:
    names = [name for name in only.split(",") if name in PARTS]
    if not names:
        raise SystemExit(f"no part is called {only!r}: use {', '.join(PARTS)}")
    return names


async def _recover(parts: dict[str, Part], story: history.History) -> list[str]:
    """Wait until everything works again, without an operator."""
    now_s = asyncio.get_running_loop().time
    until_s = now_s() + SETTLE_S
    while True:
        await asyncio.sleep(1.0)
        missing = {name: text for name, part in parts.items() if (text := part.missing()) is not None}
        if not missing:
            story.note("run", "recovered")
            return []
        if now_s() > until_s:
            return [f"{name}: not restored in {SETTLE_S:g} s: {text}" for name, text in missing.items()]


class _TraceHandler(logging.Handler):
    """The events of the services, as lines of the trace."""

    def __init__(self, story: history.History) -> None:
        super().__init__()
        self._history = story

    def emit(self, record: logging.LogRecord) -> None:
        current = process.CURRENT.get()
        facts = " ".join(f"{name}={value}" for name, value in getattr(record, "facts", {}).items())
        self._history.note(current.name if current else "-", f"{record.name} {record.getMessage()} {facts}")


@contextlib.contextmanager
def _logging(story: history.History, verbose: bool) -> Iterator[None]:
    logger = logging.getLogger(log.ROOT)
    handler, level, propagate = _TraceHandler(story), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
