from __future__ import annotations

import contextlib
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.store import urls


def test_sqlite():
    assert urls.parse("sqlite:a/b.db") == urls.SqliteUrl(pathlib.Path("a/b.db"))
    assert urls.parse("sqlite:a/b.db", pathlib.Path("/home")) == urls.SqliteUrl(pathlib.Path("/home/a/b.db"))
    assert urls.parse("sqlite:/a/b.db", pathlib.Path("/home")) == urls.SqliteUrl(pathlib.Path("/a/b.db"))
    assert urls.parse("sqlite::memory:") == urls.SqliteUrl(None)


def test_postgresql_is_shown_without_its_password():
    parsed = urls.parse("postgresql://ann:secret@db.example:5433/state?sslmode=verify-full&password=secret")
    assert isinstance(parsed, urls.PostgresUrl)
    assert parsed.shown == "postgresql://ann@db.example:5433/state"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "state.db",
        "sqlite",
        "sqlite:",
        "sqlite://host/x",
        "sqlite:a\0b",
        "mysql://x",
        "postgresql:state",
        "postgresql://host:port/x",
        "postgresql://[::1/x",
    ],
)
def test_what_is_wrong_gets_a_hint_of_what_is_right(url):
    with pytest.raises(errors.InvalidInput) as caught:
        urls.parse(url)
    assert "sqlite:PATH" in (caught.value.hint or "")


@given(st.text())
def test_any_text_is_parsed_or_refused(text):
    for url in (text, f"sqlite:{text}", f"postgresql://{text}"):
        with contextlib.suppress(errors.InvalidInput):
            urls.parse(url)
