"""A Spark streaming query: a process that works as long as its checkpoint advances.

The process of a query may run while the query does not, so the commits in its checkpoint are monitored: the
query is up from the first batch that this process commits, and late if no batch followed for ``progress_s``.
With ``progress_s`` 0, only the process is monitored. Time counts from when a batch is first seen, by a
monotonic clock; only the age of a batch from before a restart of the agent is taken from its file.
"""

from __future__ import annotations

import asyncio
import pathlib
import sys
import time
from typing import Annotated, Any

import msgspec

from muster.core import errors, health
from muster.core.settings import sections
from muster.manage.adapters import base, process

doc = sections.field_doc

WATCH_S = 2.0


class SparkQueryConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A streaming query of Spark: ``script`` with its ``arguments`` starts the query and waits for its end;
    alternatively ``module``.
    """

    script: Annotated[str, doc("Path of a Python program. Exactly one of `script` and `module`.")] = ""
    module: Annotated[str, doc("Name of a Python module.")] = ""
    arguments: Annotated[tuple[str, ...], doc("Arguments of the program.")] = ()
    master: Annotated[str, doc("Spark's master URL.")] = "local[*]"
    checkpoint: Annotated[str, doc("The query's checkpoint folder, where its progress is read.")] = ""
    progress_s: Annotated[
        float, doc("The query is down if it makes no progress for this long; 0: not checked.", ge=0, le=86400)
    ] = 0.0
    environment: Annotated[
        dict[str, process.Value], doc('Environment variables: text, or {secret: "store:NAME"}.')
    ] = {}
    stop_s: Annotated[float, doc("Time between SIGTERM and SIGKILL when it is stopped.", ge=0, le=600)] = 30.0

    def __post_init__(self) -> None:
        if bool(self.script) == bool(self.module):
            raise ValueError("exactly one of `script` and `module` is required")
        if self.progress_s and not self.checkpoint:
            raise ValueError("`progress_s` needs `checkpoint`")


class SparkQueryAdapter(process.ProcessAdapter):
    type_name = "spark-query"
    can_move = False  # its executors may run on other machines, and its checkpoint may be local
    config_type = SparkQueryConfig

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self._query: SparkQueryConfig | None = None
        self._progress: asyncio.Task[None] | None = None
        self._batch: dict[str, Any] = {}  # the last batch seen; one from before the start does not count
        self._progress_at = 0.0  # monotonic time of that batch, or of the start

    async def create(self, config: Any, *, start: bool) -> None:
        self._query = config
        await super().create(_as_process(config), start=start)
        self._watch_progress()

    async def put(self, config: Any) -> None:
        self._query = config
        await super().put(_as_process(config))
        self._watch_progress()

    async def resume(self, config: Any) -> None:
        self._query = config
        await super().resume(_as_process(config))
        await self._restore_progress()
        self._watch_progress()

    async def delete(self) -> None:
        await self._end_progress()
        await super().delete()

    async def close(self) -> None:
        await self._end_progress()
        await super().close()

    async def do_progress(self) -> dict[str, Any]:
        """The last committed batch and its time."""
        if self._query is None:
            raise errors.NotFound(f"{self.context.name} does not exist")
        return await asyncio.to_thread(_last_commit, self._query.checkpoint)

    async def _start(self) -> None:
        if self._query is not None and self._pid is None:
            self._batch = await asyncio.to_thread(_last_commit, self._query.checkpoint)
        await super()._start()

    async def _restore_progress(self) -> None:
        """A process that survived its agent is up if it committed a batch recently."""
        if self._query is None or not self._query.progress_s or self._pid is None:
            return
        self._batch = await asyncio.to_thread(_last_commit, self._query.checkpoint)
        if self._batch:
            age_s = max(0.0, time.time() - self._batch["at_s"])
            self._progress_at = time.monotonic() - age_s
            if age_s <= self._query.progress_s:
                self._report(health.HealthState.UP, "")

    def _running_state(self) -> tuple[health.HealthState, str]:
        self._progress_at = time.monotonic()
        if self._query is None or not self._query.progress_s:
            return super()._running_state()
        return health.HealthState.STARTING, "no batch committed yet"

    def _watch_progress(self) -> None:
        if self._progress is not None:
            self._progress.cancel()
            self._progress = None
        if self._query is not None and self._query.progress_s:
            self._progress = self.tasks.loop("progress", self._watch_forever)

    async def _end_progress(self) -> None:
        if self._progress is not None:
            self._progress.cancel()
            await asyncio.gather(self._progress, return_exceptions=True)
            self._progress = None

    async def _watch_forever(self) -> None:
        assert self._query is not None
        while True:
            known = self._batch
            batch = await asyncio.to_thread(_last_commit, self._query.checkpoint)
            silent_s = time.monotonic() - self._progress_at
            if known is not self._batch:
                continue  # restarted meanwhile
            if batch and batch != known:
                self._batch, self._progress_at = batch, time.monotonic()
                if self._state in (health.HealthState.STARTING, health.HealthState.LATE):
                    self._report(health.HealthState.UP, "")
            elif silent_s > self._query.progress_s and self._state in (
                health.HealthState.STARTING,
                health.HealthState.UP,
            ):
                self._report(health.HealthState.LATE, f"no batch committed for {silent_s:.0f} s")
            await asyncio.sleep(WATCH_S)


def _as_process(config: SparkQueryConfig) -> process.ProcessConfig:
    start = (config.script,) if config.script else ("-m", config.module)
    return process.ProcessConfig(
        command=(sys.executable, *start, *config.arguments),
        environment={"SPARK_MASTER": config.master, **config.environment},
        stop_s=config.stop_s,
    )


def _last_commit(checkpoint: str) -> dict[str, Any]:
    """Spark writes a file for each batch, named by its number, when the batch is done."""
    folder = pathlib.Path(checkpoint) / "commits"
    try:
        commits = [(int(path.name), path.stat().st_mtime) for path in folder.iterdir() if path.name.isdigit()]
    except OSError:
        return {}
    return {"batch": max(commits)[0], "at_s": max(commits)[1]} if commits else {}
