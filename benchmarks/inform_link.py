"""A link with a length, for `benchmarks.inform`: ``HOST PORT ONE_WAY_MS``; prints where its near end listens.

What goes in at one end comes out at the other so much later, in both directions.  Threads, because the
timers of an event loop are as coarse as a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import sys
import threading
import time


def carry(source: socket.socket, sink: socket.socket, one_way_s: float) -> None:
    """Everything from one to the other, until the one ends."""
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, data = under_way.get()
                time.sleep(max(0.0, due_s - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)

    threading.Thread(target=deliver, daemon=True).start()
    data = b"begin"
    while data:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        under_way.put((time.monotonic() + one_way_s, data))


def main(host: str, port: int, one_way_s: float) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
    while True:
        near, _ = listening.accept()
        try:
            far = socket.create_connection((host, port))
        except OSError:  # nothing listens there yet
            near.close()
            continue
        for connection in (near, far):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=carry, args=(source, sink, one_way_s), daemon=True).start()


if __name__ == "__main__":
    threading.Thread(
        target=main, args=(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1000), daemon=True
    ).start()
    sys.stdin.read()  # until we are let go
