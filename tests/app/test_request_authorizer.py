"""The registry reads the role of a sender again only when credentials have changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.app.supervisor import worker
from muster.core import errors
from muster.manage import protocol
from muster.trust import keyring
from muster.trust.permissions import roles


async def test_roles_are_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch):
    trust = keyring.Keyring.create(tmp_path / "keys", "lab")
    trust.issue("farm", roles.Role.AGENT)
    authorize = worker.RequestAuthorizer(tmp_path / "keys")
    shown: list[str] = []
    show = keyring.Keyring.show

    def count(self: keyring.Keyring, identity: str, **more: str | None):
        shown.append(identity)
        return show(self, identity, **more)

    monkeypatch.setattr(keyring.Keyring, "show", count)
    for _ in range(3):
        assert await authorize("farm", protocol.HELLO, True)
    assert shown == ["farm"], "a fleet registers every 30 s: reading the files each time costs most of it"
    with pytest.raises(errors.Forbidden, match="only an operator may apply"):
        await authorize("farm", "apply", True)
    trust.revoke("farm")
    with pytest.raises(errors.Forbidden, match="its credentials are not valid"):
        await authorize("farm", protocol.HELLO, True)
    with pytest.raises(errors.Forbidden, match="unknown"):
        await authorize("stranger", protocol.HELLO, True)


async def test_commands_inside_resources_need_a_right_that_survives_a_renewal(tmp_path: Path):
    trust = keyring.Keyring.create(tmp_path / "keys", "lab")
    trust.issue("ann", roles.Role.OPERATOR, may_run_commands=True)
    trust.issue("eve", roles.Role.OPERATOR)
    trust.issue("bob", roles.Role.USER, may_run_commands=True)
    trust.renew("ann")
    trust.renew("eve")
    authorize = worker.RequestAuthorizer(tmp_path / "keys")
    assert not await authorize("ann", protocol.SHELL, True)
    assert not await authorize("eve", "exec", True)
    with pytest.raises(errors.Forbidden, match="eve may not run commands") as refused:
        await authorize("eve", protocol.SHELL, True)
    assert "--shell" in str(refused.value.hint)
    with pytest.raises(errors.Forbidden, match="only an operator may shell"):
        await authorize("bob", protocol.SHELL, True)
