"""Sends one frame at a rate over one connection, for `benchmarks.admission`: ``URL FRAME PER_S AT_ONCE``.

The frame is encoded once, so that the sender takes little of the machine.  It prints a line when it begins,
and how many frames it sent when its input ends.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from urllib.parse import urlsplit


def main(url: str, frame: str, per_s: int, at_once: int) -> None:
    place = urlsplit(url)
    line = socket.create_connection((place.hostname, place.port))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or it sends 40 ms of the flood at once
    line.recv(1 << 16)
    line.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
    line.recv(1 << 16)
    block, each_s = bytes.fromhex(frame) * at_once, at_once / per_s
    print(json.dumps("begun"), flush=True)
    begun_s = next_s = time.perf_counter()
    sent = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        line.sendall(block)
        sent += 1
        next_s += each_s
        time.sleep(max(0.0, next_s - time.perf_counter()))
    print(json.dumps(sent * at_once / (time.perf_counter() - begun_s)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
