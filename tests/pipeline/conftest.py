"""One Spark for all tests of this folder: it takes seconds to start."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from muster.pipeline.source import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    work_dir = tmp_path_factory.mktemp("spark")
    started = session.start(master="local[2]", name="tests", work_dir=work_dir)
    yield started
    started.stop()
