"""A file: its content, mode and owner, kept as declared.

It is replaced in one step, so a reader sees the old file or the new one. It is up while it is as declared. A
difference is reported as down, with what differs; the manager then starts the resource, which writes the
file again (its restart policy bounds how often; with ``never`` a difference is only reported). A file that
was there before is kept in the resource's folder, and comes back when the resource is stopped or deleted.

With ``values``, ``{{NAME}}`` in the content is replaced, also by secrets; what was written is stored only as
a keyed digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import pathlib
import re
import secrets
import stat
from typing import Annotated, Any, ClassVar

import msgspec

from muster.core import errors, files, health
from muster.core.settings import sections
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.adapters import base, process
from muster.supervision import commands, os_process

doc = sections.field_doc

events = log.EventLog("manage")

ORIGINAL_BYTES_MAX = 16 << 20
ORIGINAL = "original"
RELOAD_S = 20.0
_PLACEHOLDER = re.compile(r"\{\{ *([A-Za-z_][A-Za-z0-9_.-]{0,127}) *\}\}")
_RESOURCE = "resource"  # the value that every file has


class FileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file on the agent's machine."""

    path: Annotated[str, doc("Absolute path; its folder has to exist.", pattern=r"^/[^\x00]*[^/\x00]$(?!\n)")]
    content: Annotated[str, doc("Its text.")] = ""
    values: Annotated[
        dict[str, process.Value],
        doc(
            'Values for {{NAME}} in `content`: text, or {secret: "store:NAME"}. {{resource}} is the name of '
            "the resource. Without `values` the content is written as it is."
        ),
    ] = {}
    mode: Annotated[str, doc('Mode bits, such as "0644".', pattern=r"^0?[0-7]{3}$(?!\n)")] = "0644"
    user: Annotated[str, doc("Owner, by name or number (default: the agent's). Needs root.")] = ""
    group: Annotated[str, doc("Group (default: that of the owner).")] = ""
    reload: Annotated[
        tuple[str, ...], doc("A command that is run after each change, such as [systemctl, reload, nginx].")
    ] = ()
    every_s: Annotated[float, doc("Interval between checks.", gt=0, le=3600)] = 5.0

    def __post_init__(self) -> None:
        if not self.values:
            return
        known = {*self.values, _RESOURCE}
        for name in _PLACEHOLDER.findall(self.content):
            if name not in known:
                raise ValueError(
                    f"content: no value for {{{{{name}}}}}; `values` has {', '.join(sorted(known))}"
                )


class FileAdapter(base.Adapter):
    """``context.runtime`` contains ``key`` and ``digest`` of what was written, its ``path``, what was there
    before (``was``: its mode and owner, or None), and whether it ``changed`` without a reload."""

    type_name = "file"
    config_type: ClassVar[type[msgspec.Struct]] = FileConfig
    _config: FileConfig | None

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self._original = b""  # if nothing is stored
        self._is_reloading = False

    async def create(self, config: FileConfig, *, start: bool) -> None:
        self._config = config
        if start:
            await self.do_start()
        self.watch(self.poll)

    async def put(self, config: FileConfig) -> None:
        self._config = config
        if "was" in self.context.runtime:  # otherwise it is stopped
            await self.do_start()
        self.watch(self.poll)

    async def delete(self) -> None:
        await self.close()
        await self._restore()
        self._config = None

    async def observe(self) -> protocol.ObservedState:
        if self._config is None:
            return protocol.ObservedState(False)
        try:
            problem = await asyncio.to_thread(self._difference, self._config)
        except OSError as error:
            return protocol.ObservedState(True, health.HealthState.UNKNOWN, str(error))
        state = health.HealthState.DOWN if problem else health.HealthState.UP
        return protocol.ObservedState(True, state, problem)

    async def resume(self, config: FileConfig) -> None:
        self._config = config
        self.watch(self.poll)

    async def do_start(self) -> None:
        """Write the file, if it is not as declared."""
        config = self._require()
        try:
            content = await self._content(config)
            account = await asyncio.to_thread(os_process.account, config.user, config.group)
            key = self.context.runtime.get("key") or secrets.token_hex(16)
            digest = _digest(key, content)
            runtime = self.context.runtime
            if runtime.get("path") != config.path:  # of an earlier configuration
                await self._restore()
            is_same = digest == runtime.get("digest")
            if is_same and not await asyncio.to_thread(self._difference, config):
                return
            if "was" not in runtime:
                runtime |= {
                    "was": await asyncio.to_thread(self._keep_original, config),
                    "path": config.path,
                }
            runtime |= {"key": key, "digest": digest, "owner": [account.user, account.group]}
            runtime["changed"] = bool(config.reload)
            await self.context.save()
            await asyncio.to_thread(
                _write, pathlib.Path(config.path), content, int(config.mode, 8), account.user, account.group
            )
        except OSError as error:
            raise errors.Refused(f"cannot write {config.path}: {error.strerror or error}") from error
        self.starts += 1
        if config.reload:
            self._is_reloading = True
            try:
                await self._reload(config)
            finally:
                self._is_reloading = False
            runtime["changed"] = False
        self.context.report_state(await self.observe())

    async def do_stop(self) -> None:
        """Bring back what was there before."""
        await self._restore()
        self.context.report_state(await self.observe())

    async def do_restart(self) -> None:
        """Write the file again, with the present secrets."""
        self.context.runtime.pop("digest", None)
        await self.do_start()

    async def _content(self, config: FileConfig) -> bytes:
        values = {_RESOURCE: self.context.name}
        for name, value in config.values.items():
            values[name] = value if isinstance(value, str) else await self.context.secret(value)
        text = config.content
        if config.values:
            text = _PLACEHOLDER.sub(lambda match: values[match[1]], text)
        return text.encode()

    def _difference(self, config: FileConfig) -> str:
        """What differs from the declared file; empty: nothing."""
        runtime, path = self.context.runtime, pathlib.Path(config.path)
        if "digest" not in runtime:
            return "it was not written"
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{config.path} is not a regular file"
            if (
                status.st_size > ORIGINAL_BYTES_MAX
                or _digest(runtime["key"], path.read_bytes()) != runtime["digest"]
            ):
                return f"the content of {config.path} differs"
        except FileNotFoundError:
            return f"{config.path} does not exist"
        if stat.S_IMODE(status.st_mode) != int(config.mode, 8):
            return f"the mode of {config.path} is {stat.S_IMODE(status.st_mode):04o} instead of {config.mode}"
        user, group = runtime.get("owner", (-1, -1))
        if user not in (-1, status.st_uid) or group not in (-1, status.st_gid):
            return f"the owner of {config.path} is {status.st_uid}:{status.st_gid} instead of {user}:{group}"
        if runtime.get("changed") and not self._is_reloading:
            return (
                f"{config.reload[0] if config.reload else 'reload'} has not succeeded since the last change"
            )
        return ""

    async def _reload(self, config: FileConfig) -> None:
        try:
            async with asyncio.timeout(RELOAD_S):
                done = await commands.run(*config.reload, capture=True)
        except TimeoutError:
            raise errors.TimedOut(f"{config.reload[0]} did not end within {RELOAD_S:g} s") from None
        except OSError as error:
            raise errors.Refused(f"cannot run {config.reload[0]}: {error.strerror or error}") from error
        if done.exit_code:
            reason = (done.errors or done.output).decode("utf-8", "replace").strip()[-500:]
            details = f": {reason}" if reason else ""
            raise errors.Refused(f"{config.reload[0]} exited with {done.exit_code}{details}")

    # What was there before

    def _keep_original(self, config: FileConfig) -> dict[str, Any] | None:
        path = pathlib.Path(config.path)
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "it exists, and is not a regular file")
        if status.st_size > ORIGINAL_BYTES_MAX:
            raise OSError(None, f"it exists, and is longer than {ORIGINAL_BYTES_MAX} bytes")
        self._original = path.read_bytes()
        if (stored := self._stored()) is not None:
            stored.parent.mkdir(parents=True, exist_ok=True)
            files.write(stored, self._original)
        return {"mode": stat.S_IMODE(status.st_mode), "user": status.st_uid, "group": status.st_gid}

    def _stored(self) -> pathlib.Path | None:
        return None if self.context.folder is None else self.context.folder / ORIGINAL

    async def _restore(self) -> None:
        runtime = self.context.runtime
        if "was" not in runtime:
            return
        try:
            await asyncio.to_thread(self._put_back, pathlib.Path(runtime["path"]), runtime["was"])
        except OSError as error:
            raise errors.Refused(f"cannot restore {runtime['path']}: {error.strerror or error}") from error
        for name in ("was", "path", "digest", "owner", "changed"):
            runtime.pop(name, None)
        await self.context.save()
        if (stored := self._stored()) is not None:  # not before: after a crash it is needed again
            await asyncio.to_thread(stored.unlink, missing_ok=True)

    def _put_back(self, path: pathlib.Path, was: dict[str, Any] | None) -> None:
        if not path.parent.is_dir():
            events.warning("not-restored", resource=self.context.name, reason=f"no folder {path.parent}")
        elif was is None:
            path.unlink(missing_ok=True)
        else:
            stored = self._stored()
            content = stored.read_bytes() if stored is not None else self._original
            try:
                _write(path, content, was["mode"], was["user"], was["group"])
            except PermissionError:  # a file of another user, in a folder of the agent
                _write(path, content, was["mode"], -1, -1)


def _digest(key: str, content: bytes) -> str:
    return hmac.new(key.encode(), content, hashlib.sha256).hexdigest()


def _write(path: pathlib.Path, content: bytes, mode: int, user: int, group: int) -> None:
    """The owner is set before the file gets its name, so nobody else can read it before. A symbolic link is
    replaced, never its target."""
    with files.FileDraft(path, mode=mode, follows=False) as draft:
        draft.path.write_bytes(content)
        if (user, group) != (-1, -1) and (user, group) != (os.geteuid(), os.getegid()):
            os.chown(draft.path, user, group)
        draft.publish()
