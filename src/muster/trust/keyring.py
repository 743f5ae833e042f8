"""A domain's keys on disk, and the documents made with them.

    operator.jwt                     the root that brokers trust
    keys/operator.seed               signs only operator.jwt: can be taken off the machine afterwards
    keys/signing.seed                signs accounts
    published                        its time is that of the newest document for other machines
    accounts/<domain>/account.seed   the account itself: can be taken off as well
    accounts/<domain>/signing.seed   signs users whose permissions are their own (narrowed topics, MQTT)
    accounts/<domain>/roles/*.seed   one for each role; what it signs can have that role only
    accounts/<domain>/grants.seed    the root of authorities: appoints those who grant restricted attributes
    accounts/<domain>/grants.public  its public half, against which grants are verified
    accounts/<domain>/secrets.key    opens the secrets in the store; created with the first one
    accounts/<domain>/account.jwt    what brokers enforce: role templates, revocations, imports
    accounts/<domain>/revoked.json   user key -> when it was revoked and when it would have expired
    accounts/<domain>/users/<identity>.jwt, .creds
    accounts/<domain>/keys/<user key>  the identity that the key was issued to: no other may have it
    accounts/<domain>/machines/<machine>/<identity>.jwt   the keys of a machine that joined, for the parts
                                     that have the same name on each machine
    accounts/<domain>/passwords/<name>.json

There is one operator for a tree of domains, and each domain is an account, so nothing passes between two
domains unless it is exported and imported. The account ``SYS`` is that of the brokers: it exports connection
events to each account, so that a lease can be taken over at once when the connection of its holder closes.

A user's record is its JWT; there is no second list that could disagree with it.

A machine that joined has public documents only (`muster.trust.machine_keys`). Exactly one machine signs.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterable

import msgspec

from muster.core import errors, subjects
from muster.trust import (
    accounts,
    credential_records,
    credentials,
    grants,
    identity_roles,
    jwt,
    nkeys,
    private_files,
    sealed_box,
)
from muster.trust.login import passwords
from muster.trust.permissions import queue_rights, roles

SYSTEM = "SYS"

# With the full resolver a broker stores an account that is sent here, and passes it to the other brokers.
CLAIMS_UPDATE = "$SYS.REQ.CLAIMS.UPDATE"

# A broker reads at most 4,096 bytes of the first line of a connection, which has more than the document.
_LINE_MAX = 3650
REVOCATIONS_MAX = 10_000  # of credentials that have not expired: the account of more exceeds a message
CLOCK_STEP_S = 86_400  # a revocation is kept for so long after the expiry of its key: clocks may be set back

_SIGNING = "keys/signing.seed"
REVOKED = "revoked.json"
SECRETS = "secrets.key"
MACHINE = "machine"
_PUBLISHED = "published"
_RESTORE = "restore it from a backup"


class Keyring:
    """Opened by `create` or `open`. ``domain`` arguments default to the root of the tree."""

    def __init__(self, folder: pathlib.Path, domain: str, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.domain = domain
        self._clock = clock
        # by domain, and by the version of the file
        self._revocations: dict[str, tuple[object, dict[str, credential_records.CredentialRevocation]]] = {}

    @classmethod
    def create(cls, folder: pathlib.Path, domain: str, *, clock: Callable[[], float] = time.time) -> Keyring:
        """New keys for a new tree of domains. All of it appears at once, or none."""
        _domain_name(domain)
        if folder.exists() and any(folder.iterdir()):
            raise errors.AlreadyExists(
                f"{folder} exists already: new keys would invalidate all issued credentials",
                hint="use the keys that are there, or name another folder",
            )
        with private_files.staged_folder(folder) as draft:
            trust = cls(draft, domain, clock=clock)
            trust._new_operator()
            trust._new_account(domain)
        return cls(folder, domain, clock=clock)

    @classmethod
    def open(cls, folder: pathlib.Path, *, clock: Callable[[], float] = time.time) -> Keyring:
        with private_files.map_os_errors(folder):
            if not folder.exists():
                raise errors.NotFound(f"no keys in {folder}", hint="`muster init` makes them")
        return cls(folder, read_document(folder / "operator.jwt", jwt.OperatorClaims)[1].name, clock=clock)

    def missing_files(self) -> list[pathlib.Path]:
        """Files without which the domain cannot start or issue credentials. The seeds of the operator and of
        the accounts are not among them: they may be stored elsewhere."""
        if self.of_machine:
            public = [self.account_folder(domain) / "account.jwt" for domain in (SYSTEM, self.domain)]
            needed = [
                self.folder / "operator.jwt",
                self.account_folder(self.domain) / "grants.public",
                *public,
            ]
            return [path for path in needed if not path.exists()]
        needed = [self.folder / "operator.jwt", self.folder / _SIGNING]
        needed.append(self.account_folder(self.domain) / "grants.public")
        for domain in (SYSTEM, self.domain):
            account = self.account_folder(domain)
            needed += [account / "account.jwt", account / "signing.seed"]
            if needed[-2].exists():
                needed += [account / "roles" / f"{role}.seed" for role in sorted(self._roles(domain))]
        return [path for path in needed if not path.exists()]

    @property
    def now_s(self) -> float:
        return self._clock()

    @property
    def signs(self) -> bool:
        """Whether this machine signs accounts. In a domain on several machines exactly one does: two could
        each undo revocations of the other."""
        return (self.folder / _SIGNING).exists()

    def check_signs(self) -> None:
        """Before anything is changed: a copy of the keys cannot revoke."""
        self._key(_SIGNING)

    @property
    def of_machine(self) -> bool:
        """Whether these are the keys of a machine that joined (`machine_keys.adopt`)."""
        return (self.folder / MACHINE).exists()

    # -- domains

    def domains(self) -> list[str]:
        # The document is written last: a folder without one was left by a crash and counts for nothing.
        names = (path.parent.name for path in (self.folder / "accounts").glob("*/account.jwt"))
        return sorted(name for name in names if name != SYSTEM)

    def add_domain(self, domain: str) -> None:
        """Create an account for another domain of the tree. Publish it to brokers with `claims_update`."""
        _domain_name(domain)
        with private_files.locked(self.folder):
            if domain in self.domains():
                raise errors.AlreadyExists(f"the domain {domain!r} is there already")
            self._new_account(domain)

    def root_authority(self, *, domain: str | None = None) -> grants.Authority:
        """Appoints the domain's authorities."""
        self._existing(domain or self.domain)
        return grants.Authority(self._key(f"accounts/{domain or self.domain}/grants.seed"))

    def root_of_grants(self, *, domain: str | None = None) -> str:
        """The public key that `grants.verify` is given; needs no secret to be on this machine."""
        path = self.account_folder(domain or self.domain) / "grants.public"
        return nkeys.require_kind(
            private_files.read_text(path, "the root of authorities"), nkeys.KeyKind.ACCOUNT
        )

    def key_of_secrets(self, *, domain: str | None = None) -> sealed_box.SealedBoxKey:
        """The key that opens the sealed secrets of the domain. A copy of the keys never makes one of its own:
        its registry could not open what another registry has stored."""
        self._existing(domain or self.domain)
        path = self.account_folder(domain or self.domain) / SECRETS
        with private_files.locked(self.folder):
            if not (self.signs or path.exists()):
                raise errors.NotFound(
                    f"these keys have no key of secrets: {path} is missing",
                    hint="only a machine that joined with the role registry has it",
                )
            return sealed_box.SealedBoxKey.kept_in(path)

    def passwords(self) -> passwords.PasswordStore:
        """The verifiers for logins with a name and a password."""
        folder = self.account_folder(self.domain) / "passwords"
        return passwords.PasswordStore(
            folder, clock=self._clock, identities=identity_roles.LoginIdentities(self)
        )

    # -- credentials

    def issue(
        self,
        identity: str,
        role: roles.Role,
        *,
        lifetime_s: float | None = None,
        domain: str | None = None,
        public_key: str | None = None,
        topics: tuple[str, ...] | None = None,
        queue_grants: queue_rights.Grants | None = None,
        may_run_commands: bool = False,
        bearer: bool = False,
    ) -> str:
        """The user JWT of a new identity (or of one that was revoked or has expired, with a new key).

        ``queue_grants``: its rights on queues; None: those of its role, or none if ``topics`` are narrowed.
        ``may_run_commands``: inside resources, as an operator.
        With ``public_key`` the private key stays where it was made, and no credentials file is stored here.
        """
        domain = self.account_of(role, domain)
        self._existing(domain)
        subjects.identity(identity)
        with private_files.locked(self.folder):
            if self.user_path(domain, identity).exists():
                record = self.show(identity, domain=domain)
                if record.status == "valid":
                    raise errors.AlreadyExists(
                        f"{identity!r} has valid credentials in {domain!r}", hint="renew or revoke them"
                    )
                if public_key == record.public_key:
                    raise errors.Refused(f"{identity!r} needs a new key: this one was {record.status}")
            if public_key in self.revocations(domain):
                raise errors.Refused(f"{identity!r} needs a new key: this one was revoked")
            key = None if public_key else nkeys.KeyPair.create(nkeys.KeyKind.USER)
            public = key.public if key else nkeys.require_kind(public_key or "", nkeys.KeyKind.USER)
            now = self._clock()
            expires_at = jwt.ends(now, lifetime_s)
            document = self.sign_user(
                domain,
                identity,
                role,
                public,
                now,
                expires_at,
                topics,
                queue_grants,
                bearer=bearer,
                marks=(credential_records.SHELL,) if may_run_commands else (),
            )
            return self.store_user(domain, identity, public, document, key)

    def renew(self, identity: str, *, lifetime_s: float | None = None, domain: str | None = None) -> str:
        """A later expiry and the present permissions for the same key; `errors.Refused` if it was revoked."""
        with private_files.locked(self.folder):
            record = self.show(identity, domain=domain)
            anew = "revoke it and issue it again: that creates a new key"
            if record.status == "revoked":
                raise errors.Refused(f"{identity!r} was revoked", hint=anew)
            # The record is the newest document. Revocations are stored until it expires, so no older document
            # of the same key may outlive it or be newer, even if the clock was changed.
            now = max(self._clock(), record.issued_at)
            expires_at = jwt.ends(now, lifetime_s)
            if expires_at and (not record.expires_at or expires_at < record.expires_at):
                raise errors.Refused(f"{identity!r} would expire earlier than it does now", hint=anew)
            user = self._claims(record.domain, identity).nats
            assert isinstance(user, jwt.UserClaims)
            topics = credential_records.topics_in(user)
            path = self.user_path(record.domain, identity).with_suffix(".creds")
            key = None
            if path.exists():
                key = nkeys.KeyPair.from_seed(self.credentials(identity, domain=record.domain).seed)
            document = self.sign_user(
                record.domain,
                identity,
                roles.Role.named(record.role),
                record.public_key,
                now,
                expires_at,
                topics or None,
                credential_records.queues_in(user),
                bearer=record.bearer,
                marks=(credential_records.SHELL,) if record.may_run_commands else (),
            )
            return self.store_user(record.domain, identity, record.public_key, document, key)

    def provide_login(self, identity: str, role: roles.Role) -> credential_records.CredentialRecord:
        """The identity of a login, made with this role if there is none.

        One that was made here, for logins only, gets the role. Any other keeps its own.
        """
        with private_files.locked(self.folder):
            try:
                record = self.show(identity)
            except errors.NotFound:
                key, now = nkeys.KeyPair.create(nkeys.KeyKind.USER), self._clock()
            else:
                if not record.of_login or record.status != "valid" or record.role == role:
                    return record
                key = nkeys.KeyPair.from_seed(self.credentials(identity).seed)
                now = max(self._clock(), record.issued_at)
            document = self.sign_user(
                self.domain,
                subjects.identity(identity),
                role,
                key.public,
                now,
                marks=(credential_records.LOGIN,),
            )
            self.store_user(self.domain, identity, key.public, document, key)
        return self.show(identity)

    def narrowed(self, identity: str, role: roles.Role) -> credentials.Credentials:
        """The credentials of a login with this role: those of the identity, or a document of the same key and
        age with fewer permissions, which is revoked with it."""
        record = self.show(identity)
        if record.status != "valid":
            raise errors.Unauthorized(f"the credentials of {identity!r} are {record.status}")
        own = self.credentials(identity)
        narrow = roles.of_login(roles.Role.named(record.role), role)
        if narrow == record.role:
            return own
        document = self.sign_user(
            self.domain, identity, narrow, record.public_key, record.issued_at, record.expires_at
        )
        return credentials.Credentials(document, own.seed)

    def sign_login(self, record: credential_records.CredentialRecord, role: roles.Role, public: str) -> str:
        """The document of a login at another machine, for a key that was made there."""
        narrow = roles.of_login(roles.Role.named(record.role), role)
        user = self._claims(record.domain, record.identity).nats
        assert isinstance(user, jwt.UserClaims)
        is_own = narrow == record.role
        return self.sign_user(
            record.domain,
            record.identity,
            narrow,
            public,
            max(self._clock(), record.issued_at),
            record.expires_at,
            (credential_records.topics_in(user) or None) if is_own else None,
            credential_records.queues_in(user) if is_own else None,
        )

    def revoke(
        self, identity: str, *, domain: str | None = None, keep_free: int = 0
    ) -> credential_records.CredentialRecord:
        """Brokers refuse it, and close its connections, once they receive the `claims_update`.

        ``keep_free``: how many further revocations must remain possible.
        """
        self.check_signs()
        with private_files.locked(self.folder):
            record = self.show(identity, domain=domain)
            held = [(identity, self._claims(record.domain, identity))]
            held += [(identity, claims) for _, claims in self.documents_on_machines(record.domain, identity)]
            if all(self.is_revoked(record.domain, claims) for _, claims in held):
                return record
            self.add_revocations(record.domain, held, keep_free=keep_free)
            self.user_path(record.domain, identity).with_suffix(".creds").unlink(missing_ok=True)
        return self.show(identity, domain=record.domain)

    def show(self, identity: str, *, domain: str | None = None) -> credential_records.CredentialRecord:
        domain = domain or self.domain
        claims = self._claims(domain, subjects.token(identity))
        user = claims.nats
        assert isinstance(user, jwt.UserClaims)
        role = roles.role_from_tags(user.tags)
        limits: jwt.UserLimits = user
        if not user.pub.allow and role is not None:
            limits = roles.limits(role, identity)
        expired = claims.exp and claims.exp <= self._clock()
        status = "revoked" if self.is_revoked(domain, claims) else "expired" if expired else "valid"
        return credential_records.CredentialRecord(
            identity=identity,
            domain=domain,
            role=role.value if role is not None else "?",
            status=status,
            public_key=claims.sub,
            serial=claims.jti,
            issued_at=claims.iat,
            expires_at=claims.exp or None,
            bearer=user.bearer_token,
            of_login=credential_records.LOGIN in user.tags,
            may_run_commands=credential_records.SHELL in user.tags,
            publish=limits.pub.allow,
            subscribe=limits.sub.allow,
            queues=credential_records.queues_of(user, role),
        )

    def is_revoked(self, domain: str, claims: jwt.JwtClaims) -> bool:
        """The same decision as in brokers."""
        revocation = self.revocations(domain).get(claims.sub)
        return revocation is not None and claims.iat <= revocation.at

    def discard_expired(self, prefix: str, role: roles.Role) -> None:
        """Delete what names with ``prefix`` and this role had, a day after it expired."""
        for record in self.records(prefix=prefix):
            if record.role == role and 0 < (record.expires_at or 0) < self._clock() - CLOCK_STEP_S:
                user = self.user_path(self.domain, record.identity)
                owner = self.account_folder(self.domain) / "keys" / record.public_key
                for path in (user.with_suffix(".creds"), owner, user):
                    path.unlink(missing_ok=True)

    def version(self, identity: str) -> tuple[tuple[int, int], ...]:
        """Differs when what `show` reads has changed. Faster than `show`."""
        account = self.account_folder(self.domain)
        user = account / "users" / f"{subjects.token(identity)}.jwt"
        paths = (user, account / "revoked.json", account / "account.jwt")
        states = (path.stat() for path in paths if path.exists())
        return tuple((state.st_ino, state.st_mtime_ns) for state in states)

    def account_path(self) -> pathlib.Path:
        """The document with the revocations of the domain and the permissions of its roles."""
        return self.account_folder(self.domain) / "account.jwt"

    def account_key(self) -> str:
        return self._public(self.domain)

    def records(
        self, *, domain: str | None = None, prefix: str = ""
    ) -> list[credential_records.CredentialRecord]:
        domain = domain or self.domain
        names = sorted(path.stem for path in (self.account_folder(domain) / "users").glob(f"{prefix}*.jwt"))
        return [self.show(name, domain=domain) for name in names]

    def credentials(self, identity: str, *, domain: str | None = None) -> credentials.Credentials:
        return credentials.Credentials.load(self.credentials_path(identity, domain=domain))

    def document(self, identity: str, *, domain: str | None = None) -> str:
        """The user JWT as it was last issued."""
        domain = domain or self.domain
        return private_files.read_text(self.user_path(domain, subjects.token(identity)), "a user's document")

    def credentials_path(self, identity: str, *, domain: str | None = None) -> pathlib.Path:
        return self.user_path(domain or self.domain, subjects.token(identity)).with_suffix(".creds")

    def check(self, user_jwt: str) -> jwt.JwtClaims:
        """What a broker would decide about this document, with the reason, which brokers do not report."""
        return self._checked(
            user_jwt, [self.account_document(name)[1] for name in (SYSTEM, *self.domains())]
        )[0]

    def limits_of(
        self, user_jwt: str, account: jwt.JwtClaims | None = None
    ) -> tuple[jwt.JwtClaims, jwt.UserLimits]:
        """As `check`, for an identity of this domain, with the permissions that a broker would give it.

        ``account``: another document of the domain (`newest_account`).
        """
        claims, account_claims = self._checked(user_jwt, [account or self.account_document(self.domain)[1]])
        scopes = {key.key: key for key in account_claims.signing_keys if isinstance(key, jwt.SigningScope)}
        if claims.iss in scopes:
            return claims, roles.filled_in(scopes[claims.iss].template, claims.name)
        assert isinstance(claims.nats, jwt.UserClaims)
        return claims, claims.nats

    def newest_account(self, copies: Iterable[str]) -> jwt.JwtClaims:
        """The newest document of the domain's account: the own one, or one of ``copies`` that brokers have
        stored, if the operator signed it. A copy of the keys learns of revocations from them."""
        newest = self.account_document(self.domain)[1]
        _, operator = read_document(self.folder / "operator.jwt", jwt.OperatorClaims)
        assert isinstance(operator.nats, jwt.OperatorClaims)
        for document in copies:
            with contextlib.suppress(errors.MusterError):
                claims = jwt.verify(document, issuers=operator.nats.signing_keys, now=self._clock())
                if claims.sub == newest.sub and claims.iat > newest.iat:
                    newest = claims
        return newest

    def _checked(
        self, user_jwt: str, accounts: Iterable[jwt.JwtClaims]
    ) -> tuple[jwt.JwtClaims, jwt.AccountClaims]:
        claims = jwt.read(user_jwt)
        if not isinstance(claims.nats, jwt.UserClaims):
            raise errors.Unauthorized(f"{claims.name!r} is not a user's document")
        account = next((account for account in accounts if account.sub == claims.nats.issuer_account), None)
        if account is None:
            raise errors.Unauthorized(f"{claims.name!r} belongs to an account that is not of this operator")
        assert isinstance(account.nats, jwt.AccountClaims)
        signers = [key if isinstance(key, str) else key.key for key in account.nats.signing_keys]
        if claims.iat <= account.nats.revocations.get(claims.sub, -1):
            raise errors.Unauthorized(f"{claims.name!r} was revoked")
        return jwt.verify(user_jwt, issuers=signers, now=self._clock()), account.nats

    # -- brokers

    def broker(self) -> accounts.BrokerTrust:
        """Accounts are brought to the present table of roles first."""
        records = {}
        with private_files.locked(self.folder):
            for domain in (SYSTEM, *self.domains()):
                self.refresh_account(domain)
                document, claims = self.account_document(domain)
                records[claims.sub] = document
        operator_jwt, _ = read_document(self.folder / "operator.jwt", jwt.OperatorClaims)
        return accounts.BrokerTrust(operator_jwt, self._public(SYSTEM), records)

    def claims_update(self, *, domain: str | None = None) -> tuple[str, bytes]:
        """Subject and payload of the request that publishes the current account to running brokers.

        To be sent with credentials of the role ``system``.
        """
        domain = domain or self.domain
        with private_files.locked(self.folder):
            self.refresh_account(domain)
            return CLAIMS_UPDATE, self.account_document(domain)[0].encode()

    # -- inside

    def _new_operator(self) -> None:
        operator, signing = (nkeys.KeyPair.create(nkeys.KeyKind.OPERATOR) for _ in range(2))
        private_files.replace_file(self.folder / "keys" / "operator.seed", operator.seed.encode())
        private_files.replace_file(self.folder / "keys" / "signing.seed", signing.seed.encode())
        self._new_account(SYSTEM)
        claims = jwt.OperatorClaims(
            signing_keys=(signing.public,), system_account=self._public(SYSTEM), strict_signing_key_usage=True
        )
        now = int(self._clock())
        document = jwt.issue(operator, operator.public, self.domain, claims, issued_at=now)
        private_files.replace_file(self.folder / "operator.jwt", document.encode())

    def _new_account(self, domain: str) -> None:
        private_files.make_folder(self.account_folder(domain))
        for name in ("account", "signing"):
            key = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
            private_files.replace_file(self.account_folder(domain) / f"{name}.seed", key.seed.encode())
        root = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
        private_files.replace_file(self.account_folder(domain) / "grants.seed", root.seed.encode())
        private_files.replace_file(self.account_folder(domain) / "grants.public", root.public.encode())
        if domain != SYSTEM:  # made now, so that each copy of the keys has it
            sealed_box.SealedBoxKey.kept_in(self.account_folder(domain) / SECRETS)
        self.refresh_account(domain)

    def refresh_account(self, domain: str) -> None:
        """Write the document of the account if its content has changed, where it can be signed."""
        if not self.signs:
            return
        path = self.account_folder(domain) / "account.jwt"
        before = self.account_document(domain)[1] if path.exists() else None
        public = before.sub if before else self._key(f"accounts/{domain}/account.seed").public
        account = self._describe(domain, public)
        if before and before.nats == msgspec.structs.replace(account, version=2):
            return
        # Brokers use the newer of two documents, and count in seconds: two changes within one second must
        # differ.
        issued_at = max(int(self._clock()), before.iat + 1 if before else 0)
        signer = self._key(_SIGNING)
        self.publish(path, jwt.issue(signer, public, domain, account, issued_at=issued_at))

    def _describe(self, domain: str, public: str) -> jwt.AccountClaims:
        system = domain == SYSTEM
        signing = self._key(f"accounts/{domain}/signing.seed").public
        role_keys = {
            role: self._role_key(domain, role).public
            for role in roles.Role
            if (role is roles.Role.SYSTEM) == system
        }
        revocations = {key: entry.at for key, entry in self.revocations(domain).items()}
        if system:
            return accounts.brokers(signing=signing, role_keys=role_keys, revocations=revocations)
        return accounts.domain(
            public,
            system=self._public(SYSTEM),
            signing=signing,
            role_keys=role_keys,
            revocations=revocations,
        )

    def sign_user(
        self,
        domain: str,
        identity: str,
        role: roles.Role,
        public: str,
        now: float,
        expires_at: int | None = None,
        topics: tuple[str, ...] | None = None,
        granted: queue_rights.Grants | None = None,
        *,
        bearer: bool = False,
        marks: tuple[str, ...] = (),
    ) -> str:
        tags = (roles.tag(role), *credential_records.tags(topics, granted), *marks)
        if topics is None and not bearer:
            signer = self._role_key(domain, role)
            user = jwt.UserClaims(issuer_account=self._public(domain), tags=tags)
        else:
            signer = self._key(f"accounts/{domain}/signing.seed")
            limits = roles.limits(role, identity, topics=topics, bearer=bearer)
            user = jwt.UserClaims(
                **msgspec.structs.asdict(limits), issuer_account=self._public(domain), tags=tags
            )
        document = jwt.issue(signer, public, identity, user, issued_at=int(now), expires_at=expires_at)
        if len(document) > _LINE_MAX and not bearer:
            raise errors.LimitExceeded(
                f"the document of {identity!r} would have {len(document)} characters; at most {_LINE_MAX}",
                hint="name fewer topics or queues",
            )
        return document

    def store_user(
        self, domain: str, identity: str, public: str, document: str, key: nkeys.KeyPair | None
    ) -> str:
        owner = self.account_folder(domain) / "keys" / public
        if not owner.exists():
            private_files.replace_file(owner, identity.encode())
        elif (other := private_files.read_text(owner, "the owner of a key")) != identity:
            raise errors.Refused(
                f"{identity!r} needs its own key: this one was issued to {other!r}",
                hint="revoking one of the two would revoke both",
            )
        path = self.user_path(domain, identity)
        self.publish(path, document)  # first: an unrecorded document could not be revoked
        if key:
            text = credentials.Credentials(document, key.seed).render()
            private_files.replace_file(path.with_suffix(".creds"), text.encode())
        else:
            path.with_suffix(".creds").unlink(missing_ok=True)
        return document

    def publish(self, path: pathlib.Path, document: str) -> None:
        """Write a document with a time later than that of any other, also within one tick of the clock, or
        after it was set back: other machines ask for what is later (`machine_keys`)."""
        latest = self.folder / _PUBLISHED
        before = latest.stat().st_mtime_ns if latest.exists() else 0
        private_files.replace_file(path, document.encode())
        at = max(path.stat().st_mtime_ns, before + 1000)
        if not before:
            private_files.replace_file(latest, b"")
        for written in (latest, path):
            os.utime(written, ns=(at, at))

    def account_of(self, role: roles.Role, domain: str | None) -> str:
        home = SYSTEM if role is roles.Role.SYSTEM else self.domain
        if (role is roles.Role.SYSTEM) != ((domain or home) == SYSTEM):
            raise errors.InvalidInput(f"the role {roles.Role.SYSTEM} and the account {SYSTEM} go together")
        return domain or home

    def _role_key(self, domain: str, role: roles.Role) -> nkeys.KeyPair:
        """Made when first needed: a new version of Muster may bring new roles."""
        name = f"accounts/{domain}/roles/{role}.seed"
        if not (self.folder / name).exists() and role not in self._roles(domain):
            key = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
            private_files.replace_file(self.folder / name, key.seed.encode())
        return self._key(name)

    def _roles(self, domain: str) -> set[str]:
        if not (self.account_folder(domain) / "account.jwt").exists():
            return set()
        account = self.account_document(domain)[1].nats
        assert isinstance(account, jwt.AccountClaims)
        return accounts.roles_of(account)

    def _key(self, name: str) -> nkeys.KeyPair:
        path = self.folder / name
        try:
            return nkeys.KeyPair.from_seed(private_files.read_text(path, "a private key"))
        except errors.NotFound as error:
            if not self.of_machine:
                raise
            raise errors.Refused(
                "this machine joined the domain: it has no keys that sign",
                hint="run the command on the machine that signs accounts",
            ) from error
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"{path}: {error.message}", hint=_RESTORE) from error

    def _claims(self, domain: str, identity: str) -> jwt.JwtClaims:
        self._existing(domain)
        path = self.user_path(domain, identity)
        if not path.exists():
            raise errors.NotFound(f"{identity!r} has no credentials in {domain!r}")
        return read_document(path, jwt.UserClaims)[1]

    def documents_on_machines(self, domain: str, identity: str) -> list[tuple[str, jwt.JwtClaims]]:
        """Those of this identity that machines that joined have, for keys of their own."""
        paths = (self.account_folder(domain) / "machines").glob(f"*/{identity}.jwt")
        return [read_document(path, jwt.UserClaims) for path in paths]

    def add_revocations(
        self, domain: str, documents: Iterable[tuple[str, jwt.JwtClaims]], *, keep_free: int = 0
    ) -> None:
        """Revoke the keys of these documents, by identity. Those that have expired are left out."""
        now = int(self._clock())
        revoked = {
            key: entry
            for key, entry in self.revocations(domain).items()
            if not entry.expires_at or entry.expires_at > now - CLOCK_STEP_S
        }
        for identity, claims in documents:
            if len(revoked) >= REVOCATIONS_MAX - keep_free:
                raise errors.LimitExceeded(
                    f"{identity!r} cannot be revoked now: {len(revoked)} revoked ones have not expired",
                    hint="a revocation ends when its credentials expire; issue those with a lifetime",
                )
            # The broker revokes what was issued up to this second; after the clock was set back it must stay
            # revoked.
            revoked[claims.sub] = credential_records.CredentialRevocation(
                identity, max(now, claims.iat), claims.exp or 0
            )
        private_files.replace_file(self.account_folder(domain) / REVOKED, msgspec.json.encode(revoked))
        self.refresh_account(domain)

    def revocations(self, domain: str) -> dict[str, credential_records.CredentialRevocation]:
        path = self.account_folder(domain) / ("account.jwt" if self.of_machine else REVOKED)
        if not path.exists():
            return {}
        state = path.stat()
        version, known = self._revocations.get(domain, (None, {}))
        if version != (state.st_ino, state.st_mtime_ns):
            if path.suffix == ".jwt":
                account = self.account_document(domain)[1].nats
                assert isinstance(account, jwt.AccountClaims)
                made = credential_records.CredentialRevocation
                known = {key: made("", at, 0) for key, at in account.revocations.items()}
            else:
                data = private_files.read(path, "the revocations", size_max=512 * REVOCATIONS_MAX)
                known = credential_records.decode_revocations(data, str(path))
            self._revocations[domain] = (state.st_ino, state.st_mtime_ns), known
        return known

    def _public(self, domain: str) -> str:
        return self.account_document(domain)[1].sub

    def account_document(self, domain: str) -> tuple[str, jwt.JwtClaims]:
        self._existing(domain)
        return read_document(self.account_folder(domain) / "account.jwt", jwt.AccountClaims)

    def _existing(self, domain: str) -> None:
        if not self.account_folder(domain).exists():
            raise errors.NotFound(f"no domain {domain[:140]!r} here: there are {', '.join(self.domains())}")

    def account_folder(self, domain: str) -> pathlib.Path:
        return self.folder / "accounts" / subjects.token(domain)

    def user_path(self, domain: str, identity: str) -> pathlib.Path:
        return self.account_folder(domain) / "users" / f"{identity}.jwt"


def _domain_name(domain: str) -> None:
    if subjects.token(domain) == SYSTEM:
        raise errors.InvalidInput(f"{SYSTEM} is the brokers' own account: choose another name")


def read_document(path: pathlib.Path, kind: type) -> tuple[str, jwt.JwtClaims]:
    """Read one of the stored documents, with its claims."""
    text = private_files.read_text(path, f"the {kind.__name__.lower()}'s document")
    try:
        claims = jwt.read(text)
    except errors.MusterError as error:
        raise errors.InvalidInput(f"{path} is damaged: {error.message}", hint=_RESTORE) from error
    if not isinstance(claims.nats, kind):
        raise errors.InvalidInput(f"{path} is not the document of an {kind.__name__.lower()}", hint=_RESTORE)
    return text, claims
