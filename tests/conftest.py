"""Every test runs under the strict rules of `muster.testing.plugin` (``muster_strict`` in pyproject.toml)."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import debian

# Installed, Muster brings this plugin by its entry point of the same name, and pytest loads it once.
pytest_plugins = ["muster.testing.plugin", "pytester", "tests.repeat", "tests.tiers", "tests.distribution"]

# Spark's Java lives for seconds here: most of what its compiler would make is never used.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

MEMORY = Path("/dev/shm")

# Random tests judge answers, not speed: a busy machine must not fail them.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """Brokers sync each of thousands of small writes: in memory, if there is room, that takes no
    time. Slow tests may write gigabytes."""
    is_small = config.getoption("markexpr") == "not slow"
    if is_small and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_report_header() -> str:
    """States what needs root before the tests run; skipped tests are listed at the end."""
    if os.geteuid() == 0:
        line = "root: small disks are mounted to be filled"
    else:
        line = "not root: tests that fill a small disk are skipped"
    missing = [f"{part.name} is missing: {part.command}" for part in debian.PARTS if not part.is_here]
    return "; ".join([line, *missing])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MiB that may be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk to fill")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def pytest_sessionstart() -> None:
    """delta-rs keeps the threads and descriptors of its first use: no test is charged with them."""
    try:
        import deltalake
    except ImportError:
        return
    import pyarrow

    with tempfile.TemporaryDirectory() as folder:
        deltalake.DeltaTable.create(folder, pyarrow.schema([("x", pyarrow.int64())]))
