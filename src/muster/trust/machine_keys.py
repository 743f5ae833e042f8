"""The keys of machines that join a domain, on both sides.

The machine that signs (`MachineKeys`) gives each part of a machine that joins a document, for a key that was
made there. A part that several machines have under the same name is one identity with several keys. A
machine that joined (`adopt`) has public documents only, beside the keys of its own parts: no seed with which
something could be signed.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Collection, Mapping

import msgspec

from muster.core import errors, subjects
from muster.trust import (
    credential_records,
    credentials,
    jwt,
    keyring,
    nkeys,
    private_files,
    sealed_box,
)
from muster.trust.permissions import roles

LOGINS = ".logins"  # the folder of the documents with which a machine acts for its clients
DOCUMENTS_BYTES = 512 << 10  # of users' documents in one reply


class PublicDocuments(msgspec.Struct, frozen=True, kw_only=True):
    """What the machines of a domain know of its identities. Without secrets."""

    operator: str
    accounts: dict[str, str]  # by domain, with that of the brokers; they have the revocations
    grants: str
    users: dict[str, str]  # documents by identity
    after: int  # for the next request; the same again: nothing is missing


class MachineKeys:
    """Of the machines that joined, where the domain's accounts are signed."""

    def __init__(self, trust: keyring.Keyring) -> None:
        self._trust = trust
        self._accounts = (keyring.SYSTEM, trust.domain)

    def of(self, machine: str) -> dict[str, str]:
        """The public keys of the parts of a machine, by identity."""
        folders = (self._folder(domain, machine) for domain in self._accounts)
        paths = (path for folder in folders for path in folder.glob("*.jwt"))
        return {path.stem: keyring.read_document(path, jwt.UserClaims)[1].sub for path in paths}

    def check_signed(self, machine: str, identity: str, proof: str, *words: str) -> None:
        """`errors.Forbidden` unless the machine's own key of this part has `signed` these words. Its identity
        shows no machine: without this, one could get documents in the name of another, and keep them when it
        is removed."""
        try:
            nkeys.verify(self.of(machine)[identity], msgspec.json.encode(words), bytes.fromhex(proof))
        except (errors.MusterError, KeyError, ValueError) as error:
            raise errors.Forbidden(f"the request is not signed with a key of {machine!r}") from error

    def _folder(self, domain: str, machine: str) -> pathlib.Path:
        return self._trust.account_folder(domain) / "machines" / subjects.token(machine)

    def issue(
        self,
        machine: str,
        parts: Mapping[str, roles.Role],
        keys: Mapping[str, str],
        *,
        shared: Collection[str] = (),
        may_run_commands: Collection[str] = (),
    ) -> dict[str, str]:
        """The documents of the parts of a machine, by identity, or an error before the first one.

        ``shared`` parts have the same name on several machines: their keys are revoked with the identity, or
        with their machine."""
        trust = self._trust
        with private_files.locked(trust.folder):
            held = self.of(machine)
            if len(set(keys.values())) < len(keys):
                raise errors.InvalidInput(f"{machine!r} needs a key for each of its parts")
            for identity, role in parts.items():
                domain = trust.account_of(role, None)
                public = nkeys.require_kind(keys[identity], nkeys.KeyKind.USER)
                if public in trust.revocations(domain):
                    raise errors.Refused(f"{identity!r} needs a new key: this one was revoked")
                if held.get(subjects.identity(identity)) == public:  # repeated
                    continue
                if identity in held or (trust.account_folder(domain) / "keys" / public).exists():
                    raise errors.Refused(f"{identity!r} of {machine!r} needs its own key, and one only")
                if identity not in shared and self._is_taken(domain, identity):
                    raise errors.Conflict(
                        f"the domain has an identity {identity!r} already",
                        hint=f"choose another name for the machine, or `muster creds revoke {identity}`",
                    )
            return {
                identity: self._issue_part(
                    machine, identity, role, keys[identity], identity in may_run_commands
                )
                for identity, role in parts.items()
            }

    def _issue_part(
        self, machine: str, identity: str, role: roles.Role, public: str, may_run_commands: bool
    ) -> str:
        trust = self._trust
        domain = trust.account_of(role, None)
        marks = (credential_records.SHELL,) if may_run_commands else ()
        document = trust.sign_user(domain, identity, role, public, trust.now_s, marks=marks)
        # First: after a crash, this is what makes the same request a repeated one.
        private_files.replace_file(self._folder(domain, machine) / f"{identity}.jwt", document.encode())
        if self._is_taken(domain, identity):
            private_files.replace_file(trust.account_folder(domain) / "keys" / public, identity.encode())
        else:
            trust.store_user(domain, identity, public, document, None)
        return document

    def _is_taken(self, domain: str, identity: str) -> bool:
        user = self._trust.user_path(domain, identity)
        return user.exists() and self._trust.show(identity, domain=domain).status != "revoked"

    def revoke(self, machine: str) -> None:
        """Revoke the keys of all parts of a machine. To be published as `keyring.Keyring.revoke`."""
        trust = self._trust
        trust.check_signs()
        with private_files.locked(trust.folder):
            for domain in self._accounts:
                folder = self._folder(domain, machine)
                logins = folder.with_name(folder.name + LOGINS)
                parts, of_logins = (
                    {path.stem: keyring.read_document(path, jwt.UserClaims)[1] for path in of.glob("*.jwt")}
                    for of in (folder, logins)
                )
                if parts or of_logins:
                    trust.add_revocations(domain, (*parts.items(), *of_logins.items()))
                shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(logins, ignore_errors=True)
                for identity, claims in parts.items():
                    self._show_other_key(domain, identity, claims.sub)

    def _show_other_key(self, domain: str, identity: str, revoked: str) -> None:
        """The record of a shared identity is a document that is valid, if a machine still has one."""
        path = self._trust.user_path(domain, identity)
        if not path.exists() or keyring.read_document(path, jwt.UserClaims)[1].sub != revoked:
            return
        for text, claims in self._trust.documents_on_machines(domain, identity):
            if not self._trust.is_revoked(domain, claims):
                self._trust.publish(path, text)
                return

    def machines(self) -> list[str]:
        """Those that have keys."""
        folders = (self._trust.account_folder(domain) / "machines" for domain in self._accounts)
        names = {path.name.removesuffix(LOGINS) for folder in folders for path in folder.glob("*")}
        return sorted(names)

    def issue_login(self, machine: str, identity: str, role: roles.Role, public: str) -> str:
        """A document for a login at a gateway, as `keyring.Keyring.narrowed`: revoked with the identity, or
        with the machine. A gateway has one key for each identity: a former one is revoked."""
        trust = self._trust
        nkeys.require_kind(public, nkeys.KeyKind.USER)
        trust.provide_login(identity, role)
        with private_files.locked(trust.folder):
            record = trust.show(identity)
            if record.status != "valid":
                raise errors.Unauthorized(f"the credentials of {identity!r} are {record.status}")
            if public in trust.revocations(trust.domain):
                raise errors.Refused(f"{identity!r} needs a new key: this one was revoked")
            owner = trust.account_folder(trust.domain) / "keys" / public
            if owner.exists() and owner.read_text() != identity:
                raise errors.Refused(f"{identity!r} needs its own key")
            document = trust.sign_login(record, role, public)
            path = self._folder(trust.domain, machine).with_name(machine + LOGINS) / f"{identity}.jwt"
            if path.exists() and (former := keyring.read_document(path, jwt.UserClaims)[1]).sub != public:
                trust.add_revocations(trust.domain, [(identity, former)])
            private_files.replace_file(path, document.encode())
            private_files.replace_file(owner, identity.encode())
        return document

    def take_later(self, copy: keyring.Keyring) -> None:
        """Take what a machine that joined knows and these keys, of a backup, do not: identities, and
        revocations. Its own parts are not of these."""
        trust = self._trust
        with private_files.locked(trust.folder):
            for domain in self._accounts:
                known = trust.revocations(domain)
                later = {key: entry for key, entry in copy.revocations(domain).items() if key not in known}
                if later:
                    path = trust.account_folder(domain) / keyring.REVOKED
                    private_files.replace_file(path, msgspec.json.encode(known | later))
                for path in (copy.account_folder(domain) / "users").glob("*.jwt"):
                    own = trust.user_path(domain, path.stem)
                    if not own.exists() and not path.with_suffix(".creds").exists():
                        trust.publish(own, path.read_text())
                trust.refresh_account(domain)

    def documents(self, after: int = -1) -> PublicDocuments:
        """What other machines need: no secrets. ``after``: only what is later (`keyring.Keyring.publish`)."""
        trust = self._trust
        own = trust.account_folder(trust.domain)
        accounts: dict[str, str] = {}
        if after < 0:  # without those a machine that joins could not start
            accounts = {domain: trust.account_document(domain)[0] for domain in self._accounts}
        users: dict[str, str] = {}
        after, size = max(after, 0), sum(map(len, accounts.values()))
        system = trust.account_folder(keyring.SYSTEM)
        paths = [system / "account.jwt", own / "account.jwt", *(own / "users").glob("*.jwt")]
        for at, path in sorted((path.stat().st_mtime_ns, path) for path in paths):
            if at <= after:
                continue
            text = path.read_text()
            if size and size + len(text) > DOCUMENTS_BYTES:
                break
            size += len(text)
            if path.parent.name == "users":
                users[path.stem] = text
            else:
                accounts[path.parent.name] = text
            after = at
        return PublicDocuments(
            operator=keyring.read_document(trust.folder / "operator.jwt", jwt.OperatorClaims)[0],
            accounts=accounts,
            grants=trust.root_of_grants(),
            users=users,
            after=after,
        )

    def seal_secrets(self, public: str, machine: str) -> str:
        """The key of secrets, in a box that only this machine's key opens."""
        self._trust.key_of_secrets()
        path = self._trust.account_folder(self._trust.domain) / keyring.SECRETS
        return sealed_box.seal(public, path.read_bytes(), f"{keyring.SECRETS} {machine}")


# On a machine that joined.


def adopt(folder: pathlib.Path, domain: str, documents: PublicDocuments) -> keyring.Keyring:
    """Create or update the keys of this machine. Its own parts keep their documents."""
    trust = keyring.Keyring(folder, domain)
    account = trust.account_folder(domain)
    private_files.make_folder(account)
    with private_files.locked(folder):
        for name, text in documents.users.items():
            path = trust.user_path(domain, subjects.token(name))
            if not path.with_suffix(".creds").exists():
                private_files.replace_file(path, text.encode())
        written = {
            account / "grants.public": documents.grants,
            **{trust.account_folder(name) / "account.jwt": text for name, text in documents.accounts.items()},
            folder / keyring.MACHINE: "",
            folder / "operator.jwt": documents.operator,
        }
        for path, text in written.items():
            if not path.exists() or path.read_text() != text:
                private_files.replace_file(path, text.encode())
    return trust


def signed(seed: str, *words: str) -> str:
    """As `MachineKeys.check_signed` expects it."""
    return nkeys.KeyPair.from_seed(seed).sign(msgspec.json.encode(words)).hex()


def store_own(
    trust: keyring.Keyring, identity: str, role: roles.Role, document: str, key: nkeys.KeyPair
) -> None:
    """The credentials of a part of this machine."""
    path = trust.user_path(trust.account_of(role, None), subjects.token(identity))
    private_files.replace_file(path, document.encode())
    text = credentials.Credentials(document, key.seed).render()
    private_files.replace_file(path.with_suffix(".creds"), text.encode())


def open_secrets(trust: keyring.Keyring, box: str, key: sealed_box.SealedBoxKey, machine: str) -> None:
    private_files.replace_file(
        trust.account_folder(trust.domain) / keyring.SECRETS, key.open(box, f"{keyring.SECRETS} {machine}")
    )
