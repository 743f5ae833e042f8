"""etcd as a peer: Debian's package, unpacked into a cache, with a client over its own gRPC.

The client is the least that does unary calls: HTTP/2 frames with literal headers and protobuf by hand, so
that what is measured is etcd and not a gateway or a library.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import pathlib
import shutil
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Mapping
from typing import Self

CACHE = pathlib.Path.home() / ".cache" / "muster" / "peers"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_SERIALIZABLE = b"\x38\x01"  # field 7 of a RangeRequest: true
_OPERATIONS_MAX = 128  # in one transaction: etcd's default
_INITIAL_WINDOW_SIZE = 4  # a setting
_FRAME_MAX = 16_384
_WINDOW = (1 << 31) - 1 - 65_535


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


@contextlib.asynccontextmanager
async def running(binary: pathlib.Path, folder: pathlib.Path) -> AsyncIterator[int]:
    """A server on free loopback ports, with its data in ``folder``. The client port."""
    client_port, peer_port = _free_port(), _free_port()
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    process = await asyncio.create_subprocess_exec(
        str(binary),
        *("--data-dir", str(folder), "--log-level", "error"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"default={peer}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError, EOFError):
                async with await Client.connect(client_port) as probe:
                    async with asyncio.timeout(2):
                        await probe.put(b"probe", b"")
                break
            await asyncio.sleep(0.05)
        yield client_port
    finally:
        process.terminate()
        await process.wait()


class Client:
    """Unary calls over one connection, as many at once as one likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next = 1
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._bodies: dict[int, bytearray] = {}
        self._initial_window = self._window = 65_535  # until the server allows more
        self._windows: dict[int, int] = {}  # of the streams
        self._grown = asyncio.Event()
        writer.write(
            _PREFACE + _frame(_SETTINGS, 0, 0, struct.pack("!HI", _INITIAL_WINDOW_SIZE, (1 << 31) - 1))
        )
        writer.write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack("!I", _WINDOW)))
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, port: int) -> Self:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(reader, writer)

    async def put(self, key: bytes, value: bytes) -> None:
        await self._call(b"/etcdserverpb.KV/Put", _field(1, key) + _field(2, value))

    async def put_all(self, values: Mapping[bytes, bytes]) -> None:
        """In one transaction, so with one entry in etcd's log."""
        puts = (_field(2, _field(1, key) + _field(2, value)) for key, value in values.items())
        await self._call(b"/etcdserverpb.KV/Txn", b"".join(_field(2, put) for put in puts))

    async def get(self, key: bytes, *, serializable: bool = False) -> bytes:
        """The answer, undecoded. A linearizable read is etcd's default; a serializable one may be old."""
        message = _field(1, key) + (_SERIALIZABLE if serializable else b"")
        return await self._call(b"/etcdserverpb.KV/Range", message)

    async def _call(self, path: bytes, message: bytes) -> bytes:
        stream, self._next = self._next, self._next + 2
        headers = b"".join(
            _literal(name, value)
            for name, value in (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", path),
                (b":authority", b"localhost"),
                (b"content-type", b"application/grpc"),
                (b"te", b"trailers"),
            )
        )
        body = struct.pack("!BI", 0, len(message)) + message
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = future
        self._bodies[stream] = bytearray()
        self._windows[stream] = self._initial_window
        frames = _frame(_HEADERS, _END_HEADERS, stream, headers)
        for start in range(0, len(body), _FRAME_MAX):
            part = body[start : start + _FRAME_MAX]
            while min(self._window, self._windows[stream]) < len(part) and not future.done():
                self._writer.write(frames)
                frames = b""
                self._grown.clear()
                await self._grown.wait()
            self._window -= len(part)
            self._windows[stream] -= len(part)
            is_last = start + _FRAME_MAX >= len(body)
            frames += _frame(_DATA, _END_STREAM if is_last else 0, stream, part)
        self._writer.write(frames)
        try:
            return await future
        finally:
            del self._windows[stream]

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
                payload = await self._reader.readexactly(size)
                if kind == _DATA:
                    self._bodies[stream] += payload
                    self._writer.write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack("!I", max(1, size))))
                elif kind == _SETTINGS and not flags & _ACK:
                    self._settings(payload)
                    self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
                elif kind == _WINDOW_UPDATE:
                    self._grow(stream, int.from_bytes(payload, "big") & 0x7FFFFFFF)
                elif kind == _PING and not flags & _ACK:
                    self._writer.write(_frame(_PING, _ACK, 0, payload))
                if flags & _END_STREAM and kind in (_DATA, _HEADERS):
                    future, body = self._waiting.pop(stream), self._bodies.pop(stream)
                    if len(body) > 5:
                        future.set_result(bytes(body[5:]))
                    else:  # an error is in the trailers, and no answer has an empty body
                        future.set_exception(ValueError("etcd refused a request"))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EOFError("etcd closed the connection"))
        self._grown.set()

    def _settings(self, payload: bytes) -> None:
        for number, value in struct.iter_unpack("!HI", payload):
            if number == _INITIAL_WINDOW_SIZE:
                for stream in self._windows:
                    self._grow(stream, value - self._initial_window)
                self._initial_window = value

    def _grow(self, stream: int, by: int) -> None:
        """What may be sent: on the connection (0), or on a stream."""
        if stream == 0:
            self._window += by
        elif stream in self._windows:
            self._windows[stream] += by
        self._grown.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


class Combining:
    """Puts of many callers at once: those that come while a transaction is under way share the next one.

    So does a client of etcd that writes much.  A key stands once in a transaction, so a second put of a key
    waits for the one after.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: collections.deque[tuple[bytes, bytes, asyncio.Future[None]]] = collections.deque()
        self._sending: asyncio.Task[None] | None = None

    async def put(self, key: bytes, value: bytes) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, value, done))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        await done

    async def _send(self) -> None:
        while self._waiting:
            values: dict[bytes, bytes] = {}
            sent: list[asyncio.Future[None]] = []
            for _ in range(len(self._waiting)):
                key, value, done = self._waiting.popleft()
                if key in values or len(values) == _OPERATIONS_MAX:
                    self._waiting.append((key, value, done))
                else:
                    values[key] = value
                    sent.append(done)
            try:
                await self._client.put_all(values)
            except Exception as error:  # noqa: BLE001  (it belongs to the callers)
                for done in sent:
                    done.set_exception(error)
            else:
                for done in sent:
                    done.set_result(None)
        self._sending = None


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack("!BBI", kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that enters no table: names and values here are short."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of protobuf."""
    size, encoded = len(data), bytearray([number << 3 | 2])
    while size >= 0x80:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded) + data


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
