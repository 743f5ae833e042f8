"""The supply chain: what is installed where, listed and compared with known vulnerabilities.

    python -m tools.supply subset OUT           requirements.lock without what only development needs
    python -m tools.supply sbom OUT WHEEL       a CycloneDX list of the wheel and all it may need
    python -m tools.supply audit ADVISORIES     compares every pinned version with advisories in OSV's format

All of it reads the lock files, which pin every version with its hashes.  ``audit`` needs a database:
a folder of OSV's JSON documents, or the archive ``all.zip`` that OSV publishes for PyPI.  None is kept here,
because one that is not fetched anew says nothing about today.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import Any

from packaging import utils, version

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-spark.lock", "requirements-amqp.lock")
BUILD_LOCK = "requirements-build.lock"
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    version: str
    via: frozenset[str]  # what needs it
    hashes: tuple[str, ...]
    text: str  # as it stands in the lock file


def pins(lock: Path) -> list[Pin]:
    pinned = []
    for text in re.split(r"\n(?=[A-Za-z0-9])", lock.read_text()):
        if match := _ENTRY.match(text):
            via = re.findall(r"#(?:\s+via)?\s+([A-Za-z0-9._-]+(?: \(pyproject\.toml[^)]*\))?)$", text, re.M)
            hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
            pinned.append(Pin(match[1], match[2], frozenset(via) - {"via"}, hashes, text.rstrip()))
    return pinned


def runtime(all_pins: list[Pin]) -> list[Pin]:
    """Those that the product needs, directly or not: an extra's, and not the group dev's."""
    needed = {"muster-fabric (pyproject.toml)"}
    size = 0
    while size != len(needed):
        size = len(needed)
        needed |= {pin.name for pin in all_pins if pin.via & needed}
    return [pin for pin in all_pins if pin.name in needed]


def subset(out: Path) -> None:
    out.write_text("\n".join(pin.text for pin in runtime(pins(ROOT / LOCKS[0]))) + "\n")


def sbom(out: Path, wheel: Path) -> None:
    """CycloneDX 1.5 in JSON. The same wheel gives the same document."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [member for member in archive.namelist() if member.endswith(".dist-info/METADATA")]
        about = message_from_bytes(archive.read(name))
    listed = {(pin.name, pin.version): pin for lock in LOCKS for pin in runtime(pins(ROOT / lock))}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": _purl(about["Name"], about["Version"]),
                "name": about["Name"],
                "version": about["Version"],
                "licenses": [{"expression": about["License-Expression"]}],
                "purl": _purl(about["Name"], about["Version"]),
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": _purl(pin.name, pin.version),
                "name": pin.name,
                "version": pin.version,
                "purl": _purl(pin.name, pin.version),
                "properties": [{"name": "muster:sha256", "value": sha256} for sha256 in pin.hashes],
            }
            for _, pin in sorted(listed.items())
        ],
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


def _purl(name: str, number: str) -> str:
    return f"pkg:pypi/{utils.canonicalize_name(name)}@{number}"


def audit(advisories: Path) -> int:
    """How many known vulnerabilities the pinned versions have."""
    versions: dict[str, dict[str, list[str]]] = {}  # name: version: lock files
    for lock in (*LOCKS, BUILD_LOCK):
        for pin in pins(ROOT / lock):
            versions.setdefault(utils.canonicalize_name(pin.name), {}).setdefault(pin.version, []).append(
                lock
            )
    read = vulnerable = 0
    for advisory in _documents(advisories):
        read += 1
        if advisory.get("withdrawn"):
            continue
        for affected in advisory.get("affected", ()):
            package = affected.get("package", {})
            if package.get("ecosystem") != "PyPI":
                continue
            name = utils.canonicalize_name(str(package.get("name", "")))
            for number, locks in versions.get(name, {}).items():
                if is_affected(number, affected):
                    vulnerable += 1
                    where = ", ".join(locks)
                    print(f"{name} {number} ({where}): {advisory['id']} {advisory.get('summary', '')}")
    pinned = sum(map(len, versions.values()))
    print(f"{pinned} pinned versions, {read} advisories read, {vulnerable} vulnerabilities")
    if not read:
        raise SystemExit(f"{advisories} holds no advisories: nothing was audited")
    return vulnerable


def is_affected(number: str, affected: dict[str, Any]) -> bool:
    """By OSV's rules: listed, or within a range of releases."""
    if number in affected.get("versions", ()):
        return True
    ours = version.Version(number)
    for version_range in affected.get("ranges", ()):
        if version_range.get("type") != "ECOSYSTEM":
            continue
        inside = False
        for event in version_range.get("events", ()):
            ((kind, text),) = event.items()
            at = version.Version("0" if text == "0" else text)
            if kind == "introduced" and ours >= at:
                inside = True
            elif (kind == "fixed" and ours >= at) or (kind == "last_affected" and ours > at):
                inside = False
        if inside:
            return True
    return False


def _documents(place: Path) -> Iterator[dict[str, Any]]:
    if place.is_dir():
        for path in sorted(place.rglob("*.json")):
            yield json.loads(path.read_bytes())
        return
    with zipfile.ZipFile(place) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                yield json.loads(archive.read(name))


def main(arguments: list[str]) -> int:
    match arguments:
        case ["subset", out]:
            subset(Path(out))
        case ["sbom", out, wheel]:
            sbom(Path(out), Path(wheel))
        case ["audit", advisories]:
            return 1 if audit(Path(advisories)) else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
