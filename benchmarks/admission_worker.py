"""Sends one frame at a rate over one connection, for `benchmarks.admission`: ``URL FRAME PER_S``.

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

PERIOD_S = 0.001


def main(url: str, frame: str, per_s: str) -> None:
    place = urlsplit(url)
    line = socket.create_connection((place.hostname, place.port))
    line.recv(1 << 16)
    line.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
    line.recv(1 << 16)
    block = bytes.fromhex(frame) * max(1, round(int(per_s) * PERIOD_S))
    each_s = max(1, round(int(per_s) * PERIOD_S)) / int(per_s)
    print(json.dumps("begun"), flush=True)
    begun_s = next_s = time.perf_counter()
    sent = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        line.sendall(block)
        sent += 1
        next_s += each_s
        time.sleep(max(0.0, next_s - time.perf_counter()))
    print(json.dumps(sent * each_s * int(per_s) / (time.perf_counter() - begun_s)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
