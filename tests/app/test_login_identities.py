"""The identities of people who log in through a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.app import identities
from muster.core import errors
from muster.trust import keyring
from muster.trust.permissions import roles

VIEWER, OPERATOR = roles.Role.VIEWER, roles.Role.OPERATOR


def test_a_person_has_an_identity_for_each_role_and_none_of_a_service(tmp_path: Path) -> None:
    trust = keyring.Keyring.create(tmp_path / "keys", "lab")
    # First with a token that only reads, then with the role of the login, then with the token again.
    named = [identities.login_credentials(trust, "ann", role).identity for role in (VIEWER, OPERATOR, VIEWER)]
    assert named == ["ann", "ann-operator", "ann"]
    assert [record.role for record in trust.records()] == [VIEWER, OPERATOR]
    trust.issue("web", roles.Role.WEB)
    with pytest.raises(errors.Conflict, match="has the role web"):
        identities.login_credentials(trust, "web", OPERATOR)
    trust.revoke("ann")
    with pytest.raises(errors.Unauthorized, match="revoked"):
        identities.login_credentials(trust, "ann", VIEWER)
