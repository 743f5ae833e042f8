"""The chapters of `muster demo`: they run, explain themselves in 80 columns, and leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.cli.start import demo
from tests.cli import driver

SCENES = {
    "roaming": ["domain", "brokers", "orders", "frozen", "moved", "roamed", "checked"],
    "policies": ["domain", "receivers", "address", "refused", "explained", "granted", "forged", "revoked"],
    "history": ["written", "searched", "summarised", "queried", "dated", "forgotten"],
}


def test_the_help_page_lists_every_chapter():
    page = driver.quick("demo", "--help").out
    for chapter in demo.CHAPTERS:
        assert f"\n  {chapter} " in page
    assert set(demo.CHAPTERS) == {"tour", "worm", *SCENES}


def _run(chapter: str, folder: Path, form: str) -> str:
    answer = driver.run("demo", chapter, "-o", form, "--home", folder / "demo", timeout_s=280)
    assert answer.code == 0, answer.err
    assert list(folder.iterdir()) == []
    return answer.out


def test_the_chapter_history_answers_its_questions(tmp_path: Path):
    """The cheapest one: no domain and no Spark."""
    out = _run("history", tmp_path, "table")
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert "all of web-17" in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chapter", ["roaming", "policies"])
def test_a_chapter_on_a_domain_runs_to_its_end(chapter, tmp_path):
    scenes = [json.loads(line) for line in _run(chapter, tmp_path, "json").splitlines()]
    assert [scene["scene"] for scene in scenes] == SCENES[chapter]
    if chapter == "roaming":
        assert (scenes[-1]["missing"], scenes[4]["broker"] != scenes[3]["broker"]) == (0, True)
        assert None not in (scenes[4]["broker"], scenes[5]["from"], scenes[5]["to"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_texts_of_a_chapter_fit_a_terminal(tmp_path):
    out = _run("policies", tmp_path, "table")
    assert [line for line in out.splitlines() if len(line) > 80] == []
