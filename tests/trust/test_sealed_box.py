from __future__ import annotations

import base64
import shutil
import stat

import pytest

from muster.core import errors
from muster.trust import keyring, sealed_box


def test_only_its_key_opens_a_box_and_only_as_what_it_is_about():
    mine, other = sealed_box.SealedBoxKey.create(), sealed_box.SealedBoxKey.create()
    box = sealed_box.seal(mine.public, b"swordfish", "kept/db")
    assert b"swordfish" not in base64.b64decode(box)
    assert mine.open(box, "kept/db") == b"swordfish"
    assert sealed_box.seal(mine.public, b"swordfish", "kept/db") != box
    with pytest.raises(errors.InvalidInput, match="another key"):
        other.open(box, "kept/db")
    with pytest.raises(errors.InvalidInput, match="not about"):
        mine.open(box, "kept/web")
    assert "swordfish" not in repr(mine)


def test_a_modified_box_does_not_open():
    mine = sealed_box.SealedBoxKey.create()
    raw = base64.b64decode(sealed_box.seal(mine.public, b"swordfish", "x"))
    for place in range(len(raw)):
        touched = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        with pytest.raises(errors.InvalidInput):
            mine.open(base64.b64encode(touched).decode(), "x")
    for nonsense in (
        "",
        "é",
        "AQ==",
        base64.b64encode(raw[:33]).decode(),
        base64.b64encode(raw[:40]).decode(),
    ):
        with pytest.raises(errors.InvalidInput):
            mine.open(nonsense, "x")
    for public in ("", "AQ==", base64.b64encode(bytes(32)).decode()):  # the last: a point of no use
        with pytest.raises(errors.InvalidInput):
            sealed_box.seal(public, b"swordfish", "x")


def test_a_domain_s_key_is_created_once_and_readable_only_by_its_owner(tmp_path):
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    first = trust.key_of_secrets()
    assert keyring.Keyring.open(tmp_path / "keys").key_of_secrets().public == first.public
    (file,) = (tmp_path / "keys").rglob("secrets.key")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    trust.add_domain("south")
    assert trust.key_of_secrets(domain="south").public != first.public


def test_copies_of_the_keys_open_the_same_secrets_and_never_make_a_key_of_their_own(tmp_path):
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    shutil.copytree(tmp_path / "keys", tmp_path / "copy")  # before any secret is stored
    (tmp_path / "copy" / "keys" / "signing.seed").unlink()
    copy = keyring.Keyring.open(tmp_path / "copy")
    assert copy.key_of_secrets().public == trust.key_of_secrets().public
    (file,) = (tmp_path / "copy").rglob("secrets.key")
    file.unlink()
    with pytest.raises(errors.NotFound, match="no key of secrets"):
        copy.key_of_secrets()
    assert not file.exists()
