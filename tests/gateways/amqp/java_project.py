"""The Maven project beside this file, compiled once; without Maven or its repository, a skip."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import shutil
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "java"
CACHE = Path.home() / ".cache" / "muster" / "jms-tests"


@functools.cache
def _digest() -> str:
    found = hashlib.sha256()
    for file in sorted(SOURCE.rglob("*.*")):
        if "target" not in file.parts and file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


async def output(*command: str, cwd: Path) -> tuple[int, str]:
    made = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await made.communicate()
    return made.returncode or 0, said.decode()


async def classpath(tmp_path: Path) -> str:
    if shutil.which("mvn") is None:
        pytest.skip("Maven is not installed, so the Java client was not tried")
    folder = CACHE / _digest()
    if not folder.exists():
        project = tmp_path / "java"
        await asyncio.to_thread(shutil.copytree, SOURCE, project, ignore=shutil.ignore_patterns("target"))
        code, said = await output(
            *("env", f"MAVEN_OPTS=-Duser.home={Path.home()}", "mvn"),  # Java asks the system, not $HOME
            *("-q", "-B", "compile", "dependency:build-classpath", "-Dmdep.outputFile=classpath"),
            cwd=project,
        )
        if code and "resolve" in said:
            pytest.skip(f"Maven cannot reach its repository, so the Java client was not tried: {said[-300:]}")
        assert code == 0, said
        await asyncio.to_thread(CACHE.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(shutil.copytree, project, folder, dirs_exist_ok=True)
    return f"{folder}/target/classes:{(folder / 'classpath').read_text().strip()}"
