"""Ended logins: they stay ended, whatever process ended them and however many end at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from muster.core import errors
from muster.web.auth import ended_logins, sessions


def session(id: str, name: str = "ann", *, for_s: float = 1000) -> sessions.LoginSession:
    return sessions.LoginSession(
        id=id,
        name=name,
        role=sessions.WebRole.VIEWER,
        kind=sessions.TokenKind.COOKIE,
        born=0,
        until=int(time.time() + for_s),
    )


async def test_logouts_at_once_in_two_processes_are_all_kept(tmp_path: Path) -> None:
    here, elsewhere = ended_logins.EndedLogins(tmp_path), ended_logins.EndedLogins(tmp_path)
    all_sessions = [session(f"s{number}", f"n{number % 3}") for number in range(40)]
    await asyncio.gather(
        *(
            asyncio.to_thread((here, elsewhere)[number % 2].add, all_session)
            for number, all_session in enumerate(all_sessions)
        )
    )
    for process in (here, elsewhere, ended_logins.EndedLogins(tmp_path)):
        assert all(process.has(all_session) for all_session in all_sessions)
        assert not process.has(session("another"))


def test_an_end_is_known_at_once_to_a_process_that_has_read_the_file(tmp_path: Path) -> None:
    here, elsewhere = ended_logins.EndedLogins(tmp_path), ended_logins.EndedLogins(tmp_path)
    here.add(session("first"))
    assert elsewhere.has(session("first"))
    assert not elsewhere.has(session("second"))
    here.add(session("second"))
    assert elsewhere.has(session("second"))


def test_a_damaged_file_does_not_mean_that_no_login_was_ended(tmp_path: Path) -> None:
    logins = ended_logins.EndedLogins(tmp_path)
    logins.add(session("first"))
    (tmp_path / "ended.json").write_bytes(b'{"ann": {"fir')
    with pytest.raises(errors.Refused, match="damaged"):
        logins.has(session("first"))
    with pytest.raises(errors.Refused, match="damaged"):
        logins.add(session("second"))


def test_no_end_is_dropped_for_space_and_expired_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_logins, "PER_NAME_MAX", 3)
    logins = ended_logins.EndedLogins(tmp_path)
    for number in range(4):
        logins.add(session(f"s{number}"))
    assert all(logins.has(session(f"s{number}")) for number in range(4))
    assert logins.is_full("ann")
    assert not logins.is_full("bob")
    logins.add(session("old", "bob", for_s=-ended_logins.CLOCK_STEP_S - 1))
    logins.add(session("new", "bob"))
    assert not logins.has(session("old", "bob"))


def test_an_end_stays_when_the_clock_goes_forth_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logins, now = ended_logins.EndedLogins(tmp_path), time.time
    logins.add(session("first"))
    with monkeypatch.context() as hours_ahead:
        hours_ahead.setattr(time, "time", lambda: now() + 3 * 3600)
        logins.add(session("second", for_s=4 * 3600))
    assert logins.has(session("first"))
