"""Admission of identities that connect to a process directly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from muster.core import errors
from muster.trust import keyring, peer_admission
from muster.trust.permissions import roles


@pytest.fixture
def trust(tmp_path: Path) -> keyring.Keyring:
    made = keyring.Keyring.create(tmp_path / "keys", "north")
    for name, role in (("ann", roles.Role.USER), ("host-a", roles.Role.AGENT)):
        made.issue(name, role)
    return made


def test_the_rights_are_those_of_the_key_that_signed_the_document(trust):
    admission = peer_admission.PeerAdmission(trust.folder)
    agent = admission.admit(trust.document("host-a"))
    expected = roles.limits(roles.Role.AGENT, "host-a").pub
    assert (agent.identity, agent.role, agent.allow, agent.deny) == (
        "host-a",
        "agent",
        expected.allow,
        expected.deny,
    )
    trust.issue("tom", roles.Role.USER, topics=("topic.a",))
    assert "topic.a" in admission.admit(trust.document("tom")).allow
    assert "topic.>" not in admission.admit(trust.document("tom")).allow


def test_only_the_roles_and_the_domain_of_the_process_are_admitted(trust):
    admission = peer_admission.PeerAdmission(trust.folder, of_roles=(roles.Role.AGENT,))
    with pytest.raises(errors.Forbidden, match="role"):
        admission.admit(trust.document("ann"))
    trust.add_domain("south")
    trust.issue("host-s", roles.Role.AGENT, domain="south")
    with pytest.raises(errors.Unauthorized, match="account"):
        admission.admit(trust.document("host-s", domain="south"))


def test_a_copy_of_the_keys_learns_of_revocations_from_the_brokers_of_its_machine(trust, tmp_path):
    copied = Path(shutil.copytree(trust.folder, tmp_path / "copy"))
    (copied / "keys" / "signing.seed").unlink()
    stored = tmp_path / "brokers" / "north" / "accounts" / f"{trust.account_key()}.jwt"
    stored.parent.mkdir(parents=True)
    admission = peer_admission.PeerAdmission(copied, brokers=tmp_path / "brokers")
    document, before = trust.document("ann"), admission.version()
    assert admission.admit(document).identity == "ann"
    trust.revoke("ann")
    stored.write_text(trust.account_path().read_text())
    assert admission.version() != before
    with pytest.raises(errors.Unauthorized, match="revoked"):
        admission.admit(document)
    other = keyring.Keyring.create(tmp_path / "other", "north")
    stored.write_text(other.account_path().read_text())  # of another operator: not believed
    assert admission.admit(document).identity == "ann"
