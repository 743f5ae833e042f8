"""The PostgreSQL that tests start: skipped with a reason where there is none, and never in CI."""

from __future__ import annotations

import os
import pathlib
import pwd

import psycopg
import pytest

from muster.core import errors
from tests import postgres


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_without_postgresql(pytester, monkeypatch, ci, outcome):
    def none() -> pathlib.Path:
        raise errors.MissingDependency("no PostgreSQL server was found")

    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(postgres, "_find_programs", none)
    pytester.makeconftest("from tests.postgres import postgres_server")
    pytester.makepyfile("def test_it(postgres_server): pass")
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines("*missing dependency: PostgreSQL; no PostgreSQL server was found*")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to run PostgreSQL as another user")
def test_programs_that_are_not_readable_are_copied(postgres_server, tmp_path):
    tmp_path.chmod(0o700)
    account = pwd.getpwnam("nobody")
    programs = postgres._find_programs()
    (tmp_path / "hidden").symlink_to(programs.parent)
    room = postgres_server._data.parent / "room"
    room.mkdir()
    copy = postgres._reachable(tmp_path / "hidden" / programs.name, room, account)
    assert copy == room / "install" / programs.name
    assert postgres._reachable(copy, room, account) == copy


async def test_it_keeps_text_as_utf_8(postgres_server):
    async with await psycopg.AsyncConnection.connect(
        postgres_server.url, password=postgres_server.password
    ) as connection:
        actual = await (await connection.execute("SHOW server_encoding")).fetchone()
    assert actual == ("UTF8",)
