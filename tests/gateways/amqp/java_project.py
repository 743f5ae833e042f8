"""The Maven projects beside this file, compiled once; without Maven or its repository, a skip.

``java`` has Qpid JMS for jakarta.jms, ``java_spring`` Spring and a pool in addition, and ``java_javax`` the
sources of ``java`` with Qpid JMS for javax.jms.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CACHE = Path.home() / ".cache" / "muster" / "jms-tests"


@functools.cache
def _digest(*projects: str) -> str:
    actual = hashlib.sha256()
    for project in projects:
        for file in sorted((FOLDER / project).rglob("*.*")):
            if "target" not in file.parts and file.is_file():
                actual.update(file.read_bytes())
    return actual.hexdigest()[:12]


async def output(*command: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    made = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    replies, _ = await made.communicate()
    return made.returncode or 0, replies.decode()


def _copy(name: str, project: Path) -> None:
    shutil.copytree(FOLDER / name, project, ignore=shutil.ignore_patterns("target"))
    if name == "java_javax":
        shutil.copytree(FOLDER / "java" / "src", project / "src", dirs_exist_ok=True)
        for file in project.rglob("*.java"):
            file.write_text(file.read_text().replace("jakarta.jms", "javax.jms"))


async def classpath(tmp_path: Path, name: str = "java") -> str:
    if shutil.which("mvn") is None:
        pytest.skip("Maven is not installed, so the Java client was not tried")
    folder = CACHE / _digest(*(["java", name] if name == "java_javax" else [name]))
    if not folder.exists():
        project = tmp_path / "java"
        await asyncio.to_thread(_copy, name, project)
        code, replies = await output(
            *("env", f"MAVEN_OPTS=-Duser.home={Path.home()}", "mvn"),  # Java asks the system, not $HOME
            *("-q", "-B", "compile", "dependency:build-classpath", "-Dmdep.outputFile=classpath"),
            cwd=project,
        )
        if code and "resolve" in replies:
            pytest.skip(
                f"Maven cannot reach its repository, so the Java client was not tried: {replies[-300:]}"
            )
        assert code == 0, replies
        await asyncio.to_thread(CACHE.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(shutil.copytree, project, folder, dirs_exist_ok=True)
    return f"{folder}/target/classes:{(folder / 'classpath').read_text().strip()}"
