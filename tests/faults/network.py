"""Hosts on a network of this machine: one network namespace each, joined by a bridge.

The harness itself runs in a namespace of its own (`enter`), so nothing of it is seen outside, and nothing is
left of it after its end.  That needs root, ip, nft and tc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests import debian

INSIDE = "MUSTER_FAULTS_NAMESPACE"
HUB = "10.77.0.254"
TABLE = "inet muster"


def address(number: int) -> str:
    return f"10.77.0.{number}"


def missing() -> str | None:
    """Why there are no namespaces here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not debian.NETWORK.is_here:
        return f"{debian.NETWORK.command} is needed"
    return None


def enter() -> None:
    """Run this program again, in namespaces of its own for processes, for the network and for mounts.

    All processes end with it, however it ends."""
    if missing() is not None:
        return
    if not os.environ.get(INSIDE):
        program = shutil.which("unshare")
        assert program is not None
        own = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = [program, *own, "--", sys.executable, *sys.orig_argv[1:]]
        os.execve(program, words, {**os.environ, INSIDE: "1"})
    if os.getpid() == 1:
        _reap()
    run("ip", "link", "set", "lo", "up")


def _reap() -> None:
    """Continue in a child. This process collects those that lost their parent, as process 1 has to."""
    child = os.fork()
    while child:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def add_hub() -> None:
    """The bridge, and the address of the clients on it."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "add", "hub", "type", "bridge")
    run("ip", "address", "add", f"{HUB}/24", "dev", "hub")
    run("ip", "link", "set", "hub", "up")


def add_host(name: str, number: int) -> None:
    run("ip", "netns", "add", name)
    run("ip", "link", "add", f"{name}-out", "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", f"{name}-out", "master", "hub", "up")
    run("ip", "-n", name, "address", "add", f"{address(number)}/24", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")
    run("ip", "-n", name, "link", "set", "lo", "up")


def add_host_behind_nat(name: str, number: int) -> None:
    """A host that reaches the others through a router with their kind of address; they cannot reach it."""
    router = f"{name}-nat"
    add_host(router, number)
    run("ip", "netns", "add", name)
    run("ip", "-n", router, "link", "add", "eth1", "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "-n", router, "address", "add", "192.168.77.1/24", "dev", "eth1")
    run("ip", "-n", router, "link", "set", "eth1", "up")
    run("ip", "-n", name, "address", "add", "192.168.77.2/24", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")
    run("ip", "-n", name, "link", "set", "lo", "up")
    run("ip", "-n", name, "route", "add", "default", "via", "192.168.77.1")
    run(*inside(router), "sysctl", "-qw", "net.ipv4.ip_forward=1")
    chain = 'type nat hook postrouting priority 100; oifname "eth0" masquerade'
    rules = f"table ip nat {{\n chain out {{ {chain}; }}\n}}\n"
    run(*inside(router), "nft", "-f", "-", text=rules)


def inside(name: str) -> list[str]:
    """The words before a command that runs on a host."""
    return ["ip", "netns", "exec", name]


# Faults.


def drop(name: str, *rules: str, peers: tuple[str, ...] = ()) -> None:
    """Drop what a host receives (``in``), sends (``out``), or a part of it (``in 10``: a tenth).

    ``peers``: only the traffic with these addresses."""
    lines = [f"table {TABLE} {{"]
    for direction, hook, field in (("in", "input", "saddr"), ("out", "output", "daddr")):
        chosen = [rule.split() for rule in rules if rule.split()[0] == direction]
        if not chosen:
            continue
        share = f"numgen random mod 100 < {chosen[0][1]} " if len(chosen[0]) > 1 else ""
        which = f"ip {field} {{ {', '.join(peers)} }} " if peers else ""
        lines += [
            f"  chain {direction} {{ type filter hook {hook} priority 0; policy accept;",
            f'    iifname "lo" accept; oifname "lo" accept; {which}{share}drop; }}',
        ]
    text = "\n".join([*lines, "}"])
    run(*inside(name), "nft", "-f", "-", text=text)


def heal(name: str) -> None:
    run(*inside(name), "nft", "flush", "ruleset")
    run(*inside(name), "tc", "qdisc", "del", "dev", "eth0", "root", check=False)


def limit(name: str, rate: str) -> None:
    """A narrow link, in the direction away from the host."""
    run(
        *inside(name),
        *("tc", "qdisc", "replace", "dev", "eth0", "root"),
        *("tbf", "rate", rate, "burst", "32kb", "latency", "400ms"),
    )


def delay(name: str, most_s: float) -> None:
    """What the host sends arrives late, by a random time."""
    half_ms = f"{most_s * 500:.0f}ms"
    run(*inside(name), "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", half_ms, half_ms)


def run(*words: str, text: str = "", check: bool = True) -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=30)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}{text}")
