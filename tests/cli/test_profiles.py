from __future__ import annotations

from muster.core import errors


def test_a_profile_is_made_listed_used_shown_and_removed(muster, tmp_path):
    assert muster("profile", "list").err.startswith("there are no profiles")
    made = muster(
        "profile", "add", "prod", "--server", "tls://a:1", "--server", "tls://b:2", "--creds", "x.creds"
    )
    assert made.code == 0
    assert muster("profile", "add", "lab", "--home", tmp_path / "lab").code == 0
    assert muster("profile", "use", "prod").code == 0
    listed = {row["name"]: row for row in muster("profile", "list", "-o", "json").json()}
    assert listed["prod"]["current"] is True
    assert listed["prod"]["servers"] == ["tls://a:1", "tls://b:2"]
    assert listed["lab"] == {
        "name": "lab", "current": False, "servers": [], "locator": None, "home": str(tmp_path / "lab"),
    }  # fmt: skip
    shown = muster("profile", "show", "-o", "json").json()
    assert shown["name"] == "prod"
    assert shown["creds"] == str(tmp_path / "x.creds")  # a path holds wherever the command is called
    assert muster("--profile", "lab", "profile", "show", "-o", "json").json()["name"] == "lab"
    assert muster("profile", "delete", "prod").code == 0
    assert (
        muster("profile", "show").code == errors.NotFound.exit_code
    )  # the current one is gone, and no other is


def test_an_unknown_profile_is_refused_with_those_there_are(muster):
    muster("profile", "add", "lab", "--server", "nats://x:1")
    answer = muster("profile", "use", "prod")
    assert answer.code == errors.NotFound.exit_code
    assert "existing profiles: lab" in answer.err


def test_a_name_cannot_leave_the_folder(muster):
    assert muster("profile", "add", "../evil", "--server", "nats://x:1").code == errors.InvalidInput.exit_code


def test_a_profile_needs_something_to_connect_to(muster):
    answer = muster("profile", "add", "empty")
    assert answer.code == errors.InvalidInput.exit_code
    assert "--server" in answer.err


def test_a_profile_keeps_no_password(muster):
    for option in ("--server", "--locator"):
        answer = muster("profile", "add", "lab", option, "nats://me:hunter2@x:1")
        assert answer.code == errors.InvalidInput.exit_code
        assert "--creds" in answer.err
        assert "hunter2" not in answer.err
    assert muster("profile", "list", "-o", "json").json() == []


def test_a_home_that_is_typed_counts_more_than_a_profile_of_the_environment(muster, monkeypatch, tmp_path):
    place = tmp_path / "home"
    assert muster("init", "--home", place).code == 0
    monkeypatch.setenv("MUSTER_PROFILE", "absent")
    assert "no profile 'absent'" in muster("get").err
    for line in (("get", "--home", place), ("--home", place, "get")):
        assert "is not running" in muster(*line).err
    assert "no profile 'typed'" in muster("--profile", "typed", "get", "--home", place).err
