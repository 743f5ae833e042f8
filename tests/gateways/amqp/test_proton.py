"""What the AMQP gateway expects of python-qpid-proton. pyproject.toml excludes its next minor version."""

from __future__ import annotations

import importlib.metadata
import pathlib
import tomllib

import pytest

proton = pytest.importorskip("proton", reason="the AMQP engine is not installed")

ROOT = pathlib.Path(__file__).parents[3]


def test_only_public_names_are_used():
    private = [
        path.name
        for path in (ROOT / "src/muster/gateways/amqp").rglob("*.py")
        if "._impl" in (text := path.read_text()) or "cproton" in text
    ]
    assert private == []


def test_wrappers_of_a_link_are_equal_keys():
    connection = proton.Connection()
    link = connection.session().sender("link")
    again = connection.link_head(0)
    assert again is not link
    assert {link: "link"}[again] == "link"


def test_the_installed_version_is_within_the_bounds():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = settings["project"]["optional-dependencies"]["amqp"]
    _, minor, *_ = importlib.metadata.version("python-qpid-proton").split(".")
    assert requirement == f"python-qpid-proton>=0.{minor},<0.{int(minor) + 1}"
