from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from muster.core import errors, files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_written_over_a_readable_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    with path.open() as opened:  # an earlier reader of the old file sees nothing of the secret
        files.write(path, b"new")
        assert opened.read() == "old"
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)
    files.write(path, b"public", mode=files.PUBLIC)
    assert mode(path) == 0o644
    assert os.listdir(tmp_path) == ["secret"]


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_device_is_not_replaced() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        files.write(Path("/dev/null"), b"x")


def test_a_new_file_does_not_replace_another(tmp_path: Path) -> None:
    files.create(tmp_path / "key", b"first")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "key", b"second")
    assert (tmp_path / "key").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["key"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(tmp_path / "kept", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write(tmp_path / "kept", b"new")
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["kept"]


def test_a_draft_appears_when_it_is_complete_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "rows"
    with files.FileDraft(path, mode=files.PUBLIC) as draft:
        with draft.path.open("wb") as file:
            file.write(b"first")
            assert not path.exists()
            file.write(b", second")
        assert draft.path.stat().st_mode & 0o777 == files.PRIVATE
        draft.publish()
    assert path.read_bytes() == b"first, second"
    assert path.stat().st_mode & 0o777 == files.PUBLIC
    assert synced == [str(draft.path), str(tmp_path)]
    assert os.listdir(tmp_path) == ["rows"]


def test_a_file_about_a_process_is_replaced_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(_: int) -> None:
        raise AssertionError("synced")

    monkeypatch.setattr(os, "fsync", sync)
    for content in (b"old", b"new"):
        files.write(tmp_path / "process.json", content, durable=False)
    assert (tmp_path / "process.json").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["process.json"]


def test_a_draft_that_is_not_published_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    files.write(tmp_path / "kept", b"old")
    with files.FileDraft(tmp_path / "kept") as draft:
        draft.path.write_bytes(b"new")
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["kept"]


def test_a_home_folder_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expanded("~/x") == tmp_path / "x"
    with pytest.raises(errors.InvalidInput, match="the home folder '~no-such-user' is not known"):
        files.expanded("~no-such-user/x")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # of a container, without an entry in passwd
    with pytest.raises(errors.InvalidInput) as refused:
        files.expanded(Path("~"))
    assert refused.value.hint == "set HOME, or write the whole path"
