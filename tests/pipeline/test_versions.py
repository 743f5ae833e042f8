"""The oldest version of Spark that `pyproject.toml` allows runs the job, too."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.gateways.amqp import java_project
from tests.pipeline import test_connector

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
TESTS = ("test_source_and_sink.py", "test_job.py", "test_checkpoint.py")


async def test_the_job_runs_on_the_oldest_spark():
    allowed = re.search(r'"pyspark>=([\d.]+),<', (ROOT / "pyproject.toml").read_text())
    assert allowed is not None
    assert test_connector.SPARK.startswith(f"pyspark=={allowed[1]}.")
    python = await test_connector.other_spark()
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    code, text = await java_project.output(
        *(sys.executable, "-c", "import pyspark; print(pyspark.__version__)"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{packages}"},
    )
    assert f"pyspark=={text.strip()}" == test_connector.SPARK
    code, text = await java_project.output(
        *(sys.executable, "-m", "pytest", "-n", "0", "-q", *(f"tests/pipeline/{name}" for name in TESTS)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{packages}:{ROOT / 'src'}"},
    )
    assert code == 0, text[-5000:]
