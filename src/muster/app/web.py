"""The web as a part of a domain: a process of its own, behind a door that the domain keeps open.

The domain listens and hands the socket over, so the address is known at once, stays the same when the web
process is started anew, and whoever calls meanwhile waits instead of being refused.  Starting a domain is not
slowed: what the web needs is imported by its own process only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import secrets
import socket
import ssl
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from muster.app import context as context_
from muster.app import home, identities, team
from muster.bus import api, client
from muster.core import errors, ground, health, hosts
from muster.trust import keyring, roles
from muster.web import settings as settings_

NEEDS = ("fastapi", "uvicorn", "pyarrow")
HINT = "pip install 'muster-fabric[web]'"
STOP_S = 5.0
WAIT_MAX_S = 30.0
ADMINISTRATOR = identities.ADMINISTRATOR


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a web process is told to be."""

    settings: settings_.Web
    listener: int  # an open socket
    domain: str
    root: str  # the domain's folder
    keys: str
    history: str
    health: ground.Health
    callbacks: tuple[str, ...] = ()  # that the SOAP doors may call
    log_level: str = "info"


def missing() -> list[str]:
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def listen(wanted: settings_.Web) -> socket.socket:
    """The wanted port; a free one if another process has it."""
    family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((wanted.host, wanted.port))
        except OSError as error:
            if not wanted.port or not hosts.is_loopback(wanted.host):
                raise errors.Unavailable(
                    f"cannot listen on {wanted.host}:{wanted.port}: {error.strerror}",
                    hint="choose another web.port or web.host",
                ) from error
            listener.bind((wanted.host, 0))
        listener.listen(256)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(wanted: settings_.Web, listener: socket.socket) -> str:
    scheme = "https" if wanted.cert else "http"
    host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def history_of(whole: Any, folder: home.Folder) -> Path:
    return Path(whole.pipeline.history_dir or folder.root / "history")


def set_password(
    trust: keyring.Trust, name: str = ADMINISTRATOR, *, role: str = "admin", password: str = ""
) -> str:
    """Let ``name`` log in; the password, which is made up if none is given. Blocks."""
    chosen = password or secrets.token_urlsafe(12)
    known = {"viewer": roles.Role.VIEWER, "operator": roles.Role.OPERATOR, "admin": roles.Role.OPERATOR}
    if role not in known:
        raise errors.InvalidInput(f"no role {role[:40]!r}: one of {', '.join(known)}")
    trust.passwords().set(name, known[role], chosen, administers=role == "admin")
    return chosen


class Door:
    """How the web reaches the domain of a folder: wherever it is now."""

    def __init__(self, folder: home.Folder, trust: keyring.Trust) -> None:
        self._folder = folder
        self._trust = trust

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        running = await self._running()
        creds = await asyncio.to_thread(identities.credentials, self._trust, identity, role)
        tls = None
        if running.ca:
            tls = await asyncio.to_thread(ssl.create_default_context, cafile=running.ca)
        return await client.connect(running.servers, creds=creds, tls=tls)

    async def place(self) -> Hashable:
        running = await asyncio.to_thread(self._folder.running)
        return None if running is None else (running.pid, running.started_at_s)

    async def _running(self) -> home.Running:
        running = await asyncio.to_thread(self._folder.running)
        if running is None:
            raise errors.NotConnected("it is not running")
        return running


class WebPart:
    name = "web"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._wanted: settings_.Web = whole.web
        self._listener: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._reason = ""

    @property
    def url(self) -> str | None:
        return None if self._listener is None else url_of(self._wanted, self._listener)

    async def start(self, context: context_.Context) -> None:
        lacking = await asyncio.to_thread(missing)
        if lacking:
            self._reason = f"{', '.join(lacking)} not installed: {HINT}"
            context.log.warning("web-missing", reason=self._reason)
            return
        self._listener = listen(self._wanted)
        self._task = context.spawn(self._keep_running(context))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._listener is not None:
            self._listener.close()

    def health(self) -> team.Health:
        if self._listener is None:
            return team.Health(health.State.DOWN, self._reason)
        facts = {"web": {"url": self.url}}
        if self._process is None or self._process.returncode is None:
            return team.Health(facts=facts)
        return team.Health(health.State.LATE, self._reason, facts)

    async def _keep_running(self, context: context_.Context) -> None:
        assert self._listener is not None
        wait_s = 0.5
        task = Task(
            settings=self._wanted,
            listener=self._listener.fileno(),
            domain=self._whole.domain.name,
            root=str(context.folder.root),
            keys=str(self._whole.keys_folder),
            history=str(history_of(self._whole, context.folder)),
            health=msgspec.structs.replace(self._whole.health, port=0),
            callbacks=self._whole.soap.callbacks,
            log_level=self._whole.log.level,
        )
        while True:
            path = context.folder.logs / "web.log"
            with path.open("ab") as output:  # not in a thread, which a cancellation would leave with it
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "muster.app.webserver",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(self._listener.fileno(),),
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            code = await self._process.wait()
            self._reason = f"ended with code {code}; see {path}"
            context.log.error("web-ended", code=code)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, WAIT_MAX_S)


def check() -> None:
    """Complain now about what is not installed."""
    lacking = missing()
    if lacking:
        raise errors.MissingPart(f"the web needs {', '.join(lacking)}, not installed", hint=HINT)
