"""SQL through REST: what operators get, and what is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline import test_history, traffic
from tests.web.conftest import Running


@pytest.fixture
def history(lab: Running) -> Iterator[Path]:
    """A history in the domain's folder, which has none otherwise."""
    settings = lab.settings
    folder = Path(settings.pipeline.history_root(settings.domain.folder))
    rows = [
        traffic.report(f"m{n}", 1, test_history.T0, zone=f"z{n % 2}", metrics={"cpu_percent": 10.0 * n})
        for n in range(10)
    ]
    test_history.store(folder, 0, rows)
    yield folder
    shutil.rmtree(folder)


def test_an_operator_queries_the_tables(history, olga, vera):
    query = (
        "SELECT zone, avg(cpu_percent) AS cpu, max(reported_at) AS at FROM nodes GROUP BY zone ORDER BY zone"
    )
    answer = olga.post("/sql", json={"query": query})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "columns": ["zone", "cpu", "at"],
        "rows": [
            {"zone": "z0", "cpu": 40.0, "at": "2023-11-15T00:00:00.000+00:00"},
            {"zone": "z1", "cpu": 50.0, "at": "2023-11-15T00:00:00.000+00:00"},
        ],
        "truncated": False,
    }
    few = olga.post("/sql", json={"query": "SELECT machine FROM nodes", "rows": 3}).json()
    assert (len(few["rows"]), few["truncated"]) == (3, True)
    refused = olga.post("/sql", json={"query": "SELECT * FROM read_text('/etc/passwd')"})
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/problem+json"
    assert "root:" not in refused.text
    assert vera.post("/sql", json={"query": query}).status_code == 403
    assert len(vera.get("/history/nodes").json()["items"]) == 10
