"""`tests.repeat`: what failed among others is repeated alone."""

import pathlib

import pytest

from tests import repeat

SUITE = """
import pathlib
import pathlib

import pytest

ATTEMPTS = pathlib.Path(__file__).with_name("attempts")

@pytest.mark.parametrize("number", range({failing}))
def test_unstable(number):
    with ATTEMPTS.open("a") as file:
        file.write("x")
    assert len(ATTEMPTS.read_text()) > {needed}
"""


@pytest.mark.may_block(reason="pytest runs in a process of its own")
@pytest.mark.parametrize(
    ("failing", "needed", "stable", "code", "attempts"),
    [
        (1, 0, "", 0, 1),  # nothing fails
        (2, 2, "", 0, 4),  # both pass when they are repeated
        (2, 9, "", 1, 4),  # they fail again
        (repeat.UNSTABLE_MAX + 1, 4, "", 1, repeat.UNSTABLE_MAX + 1),  # too many
        (1, 1, "1", 1, 1),  # not repeated
    ],
)
def test_failed_tests_are_repeated_once(
    tmp_path, monkeypatch, capfd, failing, needed, stable, code, attempts
):
    monkeypatch.setenv("STABLE", stable)
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin -p no:cacheprovider")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE.format(failing=failing, needed=needed))
    monkeypatch.chdir(tmp_path)
    arguments = ("-p", "tests.repeat", suite.name)
    assert repeat.run(*arguments, failed=tmp_path / "failed.json") == code
    assert len((tmp_path / "attempts").read_text()) == attempts
    unstable = capfd.readouterr().out.count("UNSTABLE test_suite.py")
    assert unstable == (failing if code == 0 and needed else 0)
