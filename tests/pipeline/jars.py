"""Jars for Spark from Maven's repository, fetched once; without Maven or its repository, a skip."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path

import pytest

from tests.gateways.amqp import java_project

CACHE = Path.home() / ".cache" / "muster" / "spark-jars"


async def fetch(name: str, tmp_path: Path, *groups: str) -> list[Path]:
    """The dependencies of ``spark_jars/NAME.xml``, of these groups or all."""
    if shutil.which("mvn") is None:
        pytest.skip("Maven is not installed, so Spark has no connector")
    pom = (Path(__file__).parent / "spark_jars" / f"{name}.xml").read_bytes()
    folder = CACHE / f"{name}-{hashlib.sha256(pom + repr(groups).encode()).hexdigest()[:12]}"
    if not folder.exists():
        await asyncio.to_thread((tmp_path / "pom.xml").write_bytes, pom)
        target = tmp_path / "jars"
        code, text = await java_project.output(
            *("env", f"MAVEN_OPTS=-Duser.home={Path.home()}", "mvn", "-q", "-B"),
            *("dependency:copy-dependencies", f"-DoutputDirectory={target}"),
            f"-DincludeGroupIds={','.join(groups)}",
            cwd=tmp_path,
        )
        if code and "resolve" in text:
            pytest.skip(f"Maven cannot reach its repository, so Spark has no connector: {text[-300:]}")
        assert code == 0, text
        await asyncio.to_thread(CACHE.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(shutil.copytree, target, folder, dirs_exist_ok=True)
    return sorted(folder.glob("*.jar"))
