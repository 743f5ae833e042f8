"""The addresses of this machine."""

from __future__ import annotations

from pathlib import Path

from muster.core.net import interfaces

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.0.0/24 2 0 2
        |-- 10.0.0.0
           /24 link UNICAST
        |-- 10.0.0.1
           /32 host LOCAL
        |-- 10.0.0.255
           /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 169.254.7.7
        /32 host LOCAL
Local:
     |-- 10.0.0.1
        /32 host LOCAL
     |-- 9.0.0.2
        /32 host LOCAL
"""
IF_INET6 = """\
00000000000000000000000000000001 01 80 10 80       lo
fe800000000000000000000000000001 02 40 20 80     eth0
20010db8000000000000000000000001 02 40 00 80     eth0
20010db800000000a1b2c3d4e5f60718 02 40 00 01     eth0
"""


def test_addresses_that_other_machines_may_use(tmp_path: Path):
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    (tmp_path / "if_inet6").write_text(IF_INET6)
    assert interfaces.addresses(tmp_path) == ["9.0.0.2", "10.0.0.1", "2001:db8::1"]


def test_a_container_that_shows_no_addresses_has_none(tmp_path: Path):
    assert interfaces.addresses(tmp_path) == []
