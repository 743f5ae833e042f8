"""An MQTT client and a topic of the same path use one subject, on a real broker."""

from __future__ import annotations

import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from muster.core import topics


@pytest.fixture(scope="module")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The broker's ports: its own protocol, and MQTT."""
    folder = tmp_path_factory.mktemp("mqtt")
    (folder / "nats.conf").write_text(
        f'server_name: m\nlisten: "127.0.0.1:-1"\njetstream: {{store_dir: "{folder}"}}\n'
        'mqtt: {listen: "127.0.0.1:-1"}\n'
    )
    binary = pathlib.Path(sys.executable).parent / "nats-server"
    process = subprocess.Popen([binary, "-c", folder / "nats.conf"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        ports: dict[str, int] = {}
        for line in process.stderr:
            if match := re.search(r"Listening for (client|MQTT) .*:(\d+)$", line):
                ports[match[1]] = int(match[2])
            if "Server is ready" in line:
                break
        yield ports["client"], ports["MQTT"]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def packet(kind: int, body: bytes) -> bytes:
    assert len(body) < 128
    return bytes([kind, len(body)]) + body


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "a/b/c",
        "/a",
        "a/",
        "/",
        "//",
        "a//b",
        "a.b/c.d",
        "./.",
        "x/.",
        "100%/a,b=c;d",
        "é/😀",
        "a\\b/~!@^&()[]{}|'\"",
    ],
)
def test_mqtt_meets_ours(listeners: tuple[int, int], path: str) -> None:
    nats_port, mqtt_port = listeners
    with (
        socket.create_connection(("127.0.0.1", nats_port), timeout=30) as nats,
        nats.makefile("rb") as lines,
        socket.create_connection(("127.0.0.1", mqtt_port), timeout=30) as mqtt,
    ):
        nats.sendall(b'CONNECT {"verbose":false}\r\nSUB > 1\r\nPING\r\n')
        while lines.readline() != b"PONG\r\n":
            pass
        mqtt.sendall(packet(0x10, sized(b"MQTT") + b"\x04\x02\x00\x3c" + sized(b"test-client")))
        assert mqtt.recv(4) == b"\x20\x02\x00\x00"
        mqtt.sendall(packet(0x30, sized(f"topic/{path}".encode()) + b"payload"))
        while not (line := lines.readline()).startswith((b"MSG", b"HMSG")) or b" $" in line:
            pass
    subject = line.split(b" ")[1].decode()
    assert subject == topics.Topic.from_path(path).subject
    assert topics.Topic.from_subject(subject).path == path
