"""A client of the interface that Docker and Podman share, on their local socket.

Paths have no version: Docker then answers as its newest one, and Podman as the one of Docker it follows. A
request is one connection. `ContainerEngine.attach` keeps the connection: it carries input and output of a
command that runs in a container.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import struct
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from muster.bus.http import client, server
from muster.core import errors

TIMEOUT_S = 30.0
BODY_BYTES_MAX = 64 << 20
HOST = "http://container-engine"
HINT = "start podman.socket or docker.service, and let the agent's user write to the socket"
_FRAME = struct.Struct(">BxxxL")  # the stream (1: output, 2: errors), and the size of what follows


def default_socket() -> str:
    """The first of the usual sockets that exists; otherwise that of Podman."""
    own = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}"), "podman/podman.sock")
    usual = [pathlib.Path("/run/podman/podman.sock"), pathlib.Path("/var/run/docker.sock")]
    paths = usual if os.geteuid() == 0 else [own, *usual]
    return str(next((path for path in paths if path.exists()), paths[0]))


class ContainerEngine:
    def __init__(self, socket: str = "") -> None:
        self.socket = socket or default_socket()

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        **query: str | int,
    ) -> bytes:
        """The body of the response. `errors.NotFound` and `errors.Refused` have the reason of the engine,
        `errors.Unavailable` says that there is none."""
        url = f"{HOST}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            response = await client.request(
                method,
                url,
                None if body is None else msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
                timeout_s=timeout_s,
                body_bytes_max=BODY_BYTES_MAX,
                socket=self.socket,
            )
        except errors.TimedOut:
            raise errors.TimedOut(f"{self.socket} did not answer {method} {path}") from None
        except errors.Unavailable as error:
            raise self._unavailable(error) from error
        return _checked(response)

    async def json(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        try:
            return msgspec.json.decode(await self.send(method, path, body, **query))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise errors.Unavailable(f"{self.socket} sent no JSON for {path}") from error

    async def exists(self, image: str) -> bool:
        try:
            await self.send("GET", f"/images/{urllib.parse.quote(image)}/json")
        except errors.NotFound:
            return False
        return True

    async def pull(self, image: str, *, timeout_s: float) -> None:
        """Fetch an image from its registry. The engine reports a failure in the stream of the progress."""
        name, tag = split_image(image)
        data = await self.send("POST", "/images/create", timeout_s=timeout_s, fromImage=name, tag=tag)
        for line in data.splitlines():
            try:
                progress = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(progress, dict) and progress.get("error"):
                raise errors.Refused(f"cannot pull {image}: {str(progress['error'])[:500]}")

    async def attach(
        self, path: str, body: Mapping[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request whose connection then carries input and output."""
        data = msgspec.json.encode(body)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: container-engine\r\nContent-Type: application/json\r\n"
            f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(head.encode("ascii") + data)
                await writer.drain()
                answer = await reader.readuntil(b"\r\n\r\n")
                status = int(answer.split(b" ", 2)[1])
                if status not in (101, 200):
                    rest = await reader.read(4_000)
                    _checked(server.HttpResponse(status, rest, "", {}))
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError | asyncio.IncompleteReadError | ValueError | TimeoutError):
                raise self._unavailable(error) from error
            raise
        return reader, writer

    def _unavailable(self, error: BaseException) -> errors.Unavailable:
        return errors.Unavailable(
            f"no container engine answers at {self.socket}: {error.__cause__ or error} ({HINT})"
        )


def _checked(response: server.HttpResponse) -> bytes:
    if response.status < 400:
        return response.body
    try:
        message = str(msgspec.json.decode(response.body)["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        message = response.body.decode("utf-8", "replace").strip() or f"status {response.status}"
    kind = {404: errors.NotFound, 409: errors.Conflict}.get(response.status, errors.Refused)
    raise kind(message[:1_000])


def split_image(image: str) -> tuple[str, str]:
    """Name and tag (or digest) of an image; without one it is the tag ``latest``."""
    if "@" in image:
        name, _, tag = image.partition("@")
    else:
        head, slash, last = image.rpartition("/")
        last, _, tag = last.partition(":")
        name = f"{head}{slash}{last}"
    return name, tag or "latest"


def frames(data: bytes) -> Iterator[bytes]:
    """The contents of the frames in which an engine sends output; an incomplete one is left out."""
    start = 0
    while start + _FRAME.size <= len(data):
        _, size = _FRAME.unpack_from(data, start)
        start += _FRAME.size
        if start + size > len(data):
            return
        yield data[start : start + size]
        start += size


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """The stream and the content of the next frame; None: there is none."""
    try:
        number, size = _FRAME.unpack(await reader.readexactly(_FRAME.size))
        return number, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
