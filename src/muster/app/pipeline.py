"""The pipeline as a part of a domain: a process of its own, since it is a large one, kept running.

It is not vital: a domain without it messages, notifies and manages as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from muster.app import context as context_
from muster.app import home, identities, team
from muster.core import ground, health
from muster.pipeline import settings as settings_
from muster.trust import keyring, roles

STOP_S = 60.0
WAIT_MAX_S = 60.0
OPTIONS_NAME = "options.json"


def options(
    settings: ground.Ground,
    pipeline: settings_.Pipeline,
    folder: home.Folder,
    trust: keyring.Trust,
    running: home.Running,
) -> dict[str, Any]:
    """What `muster.pipeline.run` needs to know; issues the pipeline's credentials. Blocks."""
    return {
        "folder": str(folder.root),
        "servers": running.servers,
        "credentials": str(identities.credentials_file(trust, pipeline.name, roles.Role.PIPELINE)),
        "ca": running.ca,
        "history_max_bytes": settings.retention.history.max_bytes,
        "history_max_age_s": settings.retention.history.max_age_s,
        "settings": pipeline,
    }


class PipelinePart:
    name = "pipeline"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: settings_.Pipeline) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._restarts = 0
        self._reason = "starting"

    async def start(self, context: context_.Context) -> None:
        self._task = context.spawn(self._keep_running(context))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()

    def health(self) -> team.Health:
        if self._process is not None and self._process.returncode is None:
            return team.Health()
        return team.Health(state=health.State.DOWN, reason=self._reason)

    async def _keep_running(self, context: context_.Context) -> None:
        wait_s = 1.0
        while True:
            path = await self._write_options(context)
            log = await asyncio.to_thread(_open_log, context.folder.logs / "pipeline.log")
            with log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "muster.pipeline.run",
                    str(path),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            code = await self._process.wait()
            if code == 0:
                self._reason = "stopped on request"
                return
            self._restarts += 1
            self._reason = f"ended with code {code}; see {context.folder.logs / 'pipeline.log'}"
            context.log.error("pipeline-ended", code=code, restarts=self._restarts)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, WAIT_MAX_S)

    async def _write_options(self, context: context_.Context) -> Path:
        while True:  # the domain says where it listens when all parts have started
            running = await asyncio.to_thread(context.folder.running)
            if running is not None:
                return await asyncio.to_thread(self._prepare, context, running)
            await asyncio.sleep(0.1)

    def _prepare(self, context: context_.Context, running: home.Running) -> Path:
        told = options(context.settings, self._settings, context.folder, context.trust, running)
        path = context.folder.root / "pipeline" / OPTIONS_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(told))
        return path


def _open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
