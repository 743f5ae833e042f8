"""The addresses of this machine, as Linux lists them. The name of the machine is no source for them: in many
installations it resolves to a loopback address only.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

_PROC = Path("/proc/net")
_LOCAL = re.compile(r"(\d+(?:\.\d+){3})\n\s+/32 host LOCAL")
_GLOBAL = "00"  # scope
_TEMPORARY = 0x01  # a flag of addresses that are replaced after some hours


def addresses(folder: Path = _PROC) -> list[str]:
    """Addresses that other machines may use, IPv4 first: neither loopback nor link-local. Blocks."""
    texts = [*_LOCAL.findall(_read(folder / "fib_trie"))]
    for line in _read(folder / "if_inet6").splitlines():
        digits, _, _, scope, flags, _ = line.split()
        if scope == _GLOBAL and not int(flags, 16) & _TEMPORARY:
            texts.append(str(ipaddress.IPv6Address(int(digits, 16))))
    parsed = {ipaddress.ip_address(text) for text in texts}
    usable = [address for address in parsed if not address.is_loopback and not address.is_link_local]
    return [str(address) for address in sorted(usable, key=lambda address: (address.version, int(address)))]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no IPv6, or a restricted container
        return ""
