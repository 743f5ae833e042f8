"""etcd as a peer: Debian's package, unpacked into a cache, with its own client in Go (`etcd_go`).

The client is a process that is compiled once, into the cache, and makes the calls that it is ordered to make.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

from benchmarks import measure

CACHE = pathlib.Path.home() / ".cache" / "muster" / "peers"
SOURCE = pathlib.Path(__file__).parent / "etcd_go"
BUILD_S_MAX = 300


def find() -> pathlib.Path | None:
    """The binary: installed, in the cache, or fetched as a Debian package. None where there is none."""
    if installed := shutil.which("etcd"):
        return pathlib.Path(installed)
    binary = CACHE / "usr" / "bin" / "etcd"
    if not binary.exists() and not unpack_package("etcd-server", CACHE):
        print("no etcd to compare with: it is not installed and not in the package sources")
    return binary if binary.exists() else None


def unpack_package(name: str, folder: pathlib.Path) -> bool:
    """Fetch a Debian package and unpack it into a folder, without installing it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["apt-get", "download", name], cwd=folder, check=True, capture_output=True, timeout=120
        )
        (package,) = folder.glob(f"{name}_*.deb")
        subprocess.run(["dpkg", "-x", package, folder], check=True, capture_output=True, timeout=60)
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return True


def client() -> pathlib.Path | None:
    """The client, compiled if it is not there; None, and why is printed, where that cannot be."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(SOURCE.iterdir()))).hexdigest()
    program = CACHE / f"etcd-client-{digest[:12]}"
    if not program.exists():
        if shutil.which("go") is None:
            print("no etcd to compare with: its client needs Go, which is not installed")
            return None
        CACHE.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["go", "build", "-o", str(program), "."],
                cwd=SOURCE,
                env={**os.environ, "GOTOOLCHAIN": "local"},
                check=True,
                capture_output=True,
                timeout=BUILD_S_MAX,
            )
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no etcd to compare with: Go could not build its client: {error}")
            return None
    return program


@contextlib.asynccontextmanager
async def running(binary: pathlib.Path, folder: pathlib.Path, members: int = 1) -> AsyncIterator[list[int]]:
    """A cluster on free loopback ports, with its data in ``folder``. The client ports."""
    clients, peers = ([_free_port() for _ in range(members)] for _ in range(2))
    cluster = ",".join(f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(peers))
    processes = [
        await asyncio.create_subprocess_exec(
            str(binary),
            *("--name", f"m{number}", "--data-dir", str(folder / f"m{number}"), "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for number in range(members)
        for client, peer in [[f"http://127.0.0.1:{ports[number]}" for ports in (clients, peers)]]
    ]
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                for port in clients:
                    await asyncio.to_thread(put, port, "probe", b"")
                break
            await asyncio.sleep(0.05)
        yield clients
    finally:
        for process in processes:
            process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


def put(port: int, key: str, value: bytes) -> None:
    """Through its JSON gateway."""
    body = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value).decode()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v3/kv/put", json.dumps(body).encode())
    urllib.request.urlopen(request, timeout=5).close()


class Client(measure.Worker):
    """The Go client in a process of its own."""

    def __init__(self, program: pathlib.Path, ports: list[int]) -> None:
        self.name = "the client of etcd"
        self._process = subprocess.Popen(
            [str(program), ",".join(f"127.0.0.1:{port}" for port in ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.hear()

    async def times_ms(self, kind: str, count: int) -> list[float]:
        """Of calls by one caller."""
        times_ms: list[float] = (await self._run(kind, count, 1))["ms"]
        return times_ms

    async def per_second(self, kind: str, count: int, callers: int) -> float:
        return count / float((await self._run(kind, count, callers))["took_s"])

    async def _run(self, kind: str, count: int, callers: int) -> Any:
        self.tell({"kind": kind, "count": count, "callers": callers})
        return await asyncio.to_thread(self.hear)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
