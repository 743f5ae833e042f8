"""Passwords, for interfaces whose clients support nothing else: SASL, MQTT bridges, the web.

A password is a separate credential: a name, a role, and *verifiers*, from which the password cannot be
computed. Two kinds are stored, for two kinds of interfaces:

- scrypt, for interfaces that receive the password itself (web, SASL PLAIN): memory-hard, so that guessing
  is expensive;
- SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, 7677), for interfaces where the client proves that it has the
  password without sending it.  For a thief of the file they are cheaper to guess than scrypt, so they are
  made only on request.

A check takes some 0.1 s of a core, on purpose: call it in a thread. An unknown name takes the same time as a
wrong password, so the time does not reveal which names exist.
"""

from __future__ import annotations

import hashlib
import hmac
import pathlib
import secrets
import stringprep
import time
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from muster.core import errors, subjects
from muster.trust import identity_roles, jwt, private_files
from muster.trust.permissions import own_names, roles

LENGTH_MIN = 8
LENGTH_MAX = 1024
_SALT_BYTES = 16

# 64 MiB and about 0.1 s on one core of 2024; written into each verifier, so they can be raised later.
_SCRYPT_LOG_N = 16
_SCRYPT_R = 8
_SCRYPT_P = 1

MECHANISMS = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_ITERATIONS = {"SCRAM-SHA-256": 600_000, "SCRAM-SHA-512": 210_000}


class ScryptVerifier(msgspec.Struct, frozen=True):
    salt: bytes
    log_n: int
    r: int
    p: int
    digest: bytes


class ScramVerifier(msgspec.Struct, frozen=True):
    """The data of a SCRAM server: it can check a proof, and prove that it could, without the password."""

    mechanism: str
    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


class PasswordRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: roles.Role
    created_at: int
    expires_at: int = 0  # 0: never
    administers: bool = False  # an operator who also manages logins
    scrypt: ScryptVerifier
    scram: tuple[ScramVerifier, ...] = ()

    @property
    def login(self) -> PasswordLogin:
        return PasswordLogin(self.name, self.role, self.scrypt.salt.hex())

    def expired(self, now_s: float) -> bool:
        return 0 < self.expires_at <= now_s


@dataclass(frozen=True, slots=True)
class PasswordLogin:
    """An account that logged in, and its role."""

    name: str
    role: roles.Role
    verifier: str = field(default="", compare=False)  # differs after each change of the password


def prepare(password: str) -> bytes:
    """The bytes that are hashed: SASLprep (RFC 4013), so that two keyboards' spellings of one text agree."""
    mapped = (" " if stringprep.in_table_c12(c) else c for c in password if not stringprep.in_table_b1(c))
    text = unicodedata.normalize("NFKC", "".join(mapped))
    if any(prohibited(c) for c in text for prohibited in _PROHIBITED):
        raise errors.InvalidInput("a password may not hold control characters")
    return text.encode()


_PROHIBITED = (
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def scrypt(password: bytes, salt: bytes) -> ScryptVerifier:
    digest = _scrypt(password, salt, _SCRYPT_LOG_N, _SCRYPT_R, _SCRYPT_P)
    return ScryptVerifier(salt, _SCRYPT_LOG_N, _SCRYPT_R, _SCRYPT_P, digest)


def matches(verifier: ScryptVerifier, password: bytes) -> bool:
    digest = _scrypt(password, verifier.salt, verifier.log_n, verifier.r, verifier.p)
    return hmac.compare_digest(digest, verifier.digest)


def scram(password: bytes, mechanism: str, salt: bytes, *, iterations: int | None = None) -> ScramVerifier:
    if mechanism not in MECHANISMS:
        raise errors.InvalidInput(f"no mechanism {mechanism[:40]!r}: one of {', '.join(MECHANISMS)}")
    algorithm = MECHANISMS[mechanism]
    rounds = iterations or _ITERATIONS[mechanism]
    salted = hashlib.pbkdf2_hmac(algorithm, password, salt, rounds)
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    server_key = hmac.digest(salted, b"Server Key", algorithm)
    return ScramVerifier(mechanism, salt, rounds, hashlib.new(algorithm, client_key).digest(), server_key)


def check_scram_proof(verifier: ScramVerifier, auth_message: bytes, proof: bytes) -> bytes:
    """The signature of the server, if ``proof`` shows that the client has the password.

    ``auth_message`` is what RFC 5802 section 3 calls so: the exchange until then, joined by commas.
    """
    algorithm = MECHANISMS[verifier.mechanism]
    signature = hmac.digest(verifier.stored_key, auth_message, algorithm)
    if len(proof) != len(signature):
        raise errors.Unauthorized("the proof has the wrong length")
    client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
    if not hmac.compare_digest(hashlib.new(algorithm, client_key).digest(), verifier.stored_key):
        raise errors.Unauthorized("wrong name or password")
    return hmac.digest(verifier.server_key, auth_message, algorithm)


class PasswordStore:
    """The verifiers of a domain, one file for each name.

    ``identities``: those that the logins refer to; None for verifiers alone.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        clock: Callable[[], float] = time.time,
        identities: identity_roles.LoginIdentities | None = None,
    ) -> None:
        self.identities = identities
        self._folder = folder
        self._clock = clock
        self._digest: tuple[tuple[tuple[str, int, int], ...], str] | None = None

    @property
    def attempts(self) -> pathlib.Path:
        """The log of checks that the processes of the domain share (`muster.trust.login.attempt_log`)."""
        return self._folder / "attempts.log"

    def set(
        self,
        name: str,
        role: roles.Role,
        password: str,
        *,
        lifetime_s: float | None = None,
        mechanisms: tuple[str, ...] = (),
        administers: bool = False,
    ) -> None:
        """Create or replace it; ``mechanisms`` names the additional SCRAM verifiers."""
        if not LENGTH_MIN <= len(password) <= LENGTH_MAX:
            raise errors.InvalidInput(f"a password has {LENGTH_MIN} to {LENGTH_MAX} characters")
        own_names.check(name, role)
        prepared = prepare(password)
        if self.identities is not None:
            self.identities.prepare(name, role)
        now = self._clock()
        try:
            after = self.get(name).created_at + 1
        except (errors.NotFound, errors.InvalidInput):
            after = 0
        made = PasswordRecord(
            name=subjects.token(name),
            role=role,
            created_at=max(int(now), after),  # later than that of every password before: sessions compare it
            expires_at=jwt.ends(now, lifetime_s) or 0,
            administers=administers,
            scrypt=scrypt(prepared, secrets.token_bytes(_SALT_BYTES)),
            scram=tuple(scram(prepared, each, secrets.token_bytes(_SALT_BYTES)) for each in mechanisms),
        )
        private_files.replace_file(self._path(name), msgspec.json.encode(made))

    def verify(self, name: str, password: str) -> PasswordRecord:
        """The account's record, if the password is right.

        `errors.Unauthorized` reads the same for an unknown account as for a wrong password.
        """
        try:
            prepared = prepare(password[: LENGTH_MAX + 1])
            record = self.get(name)
        except (errors.InvalidInput, errors.NotFound):
            prepared, record = b"", None
        verifier = record.scrypt if record else _NOBODY
        if not matches(verifier, prepared) or record is None:
            raise errors.Unauthorized("wrong name or password")
        if record.expired(self._clock()):
            raise errors.Unauthorized(f"the password of {record.name!r} has expired")
        return self._limited(record)

    def check(self, name: str, password: str) -> PasswordLogin:
        """Like `verify`, with the permissions of the account as the result."""
        return self.verify(name, password).login

    def scram(self, name: str, mechanism: str) -> ScramVerifier:
        """The account's verifier, or one that no proof fits.

        The challenge has the salt and iterations before the client has proved anything. So a salt is sent
        also for an account that does not exist, has expired or has no such verifier: always the same for the
        same name, otherwise a second request would reveal it.
        """
        try:
            record = self.get(name)
            if not record.expired(self._clock()):
                for verifier in record.scram:
                    if verifier.mechanism == mechanism:
                        return verifier
        except (errors.InvalidInput, errors.NotFound):
            pass
        return self._decoy(name, mechanism)

    def _decoy(self, name: str, mechanism: str) -> ScramVerifier:
        algorithm = MECHANISMS[mechanism]
        key = self._decoy_key()
        salt = hmac.digest(key, f"salt {mechanism} {name}".encode(), "sha256")[:_SALT_BYTES]
        stored = hmac.digest(key, f"stored {mechanism} {name}".encode(), algorithm)
        return ScramVerifier(mechanism, salt, _ITERATIONS[mechanism], stored, stored)

    def _decoy_key(self) -> bytes:
        """Stored with the verifiers, so that all processes of the domain return the same salts."""
        path = self._folder / "decoy.key"
        if not path.exists():
            private_files.make_folder(self._folder)
            with private_files.locked(self._folder):
                if not path.exists():
                    private_files.replace_file(path, secrets.token_bytes(32))
        return private_files.read(path, "the key of unknown accounts' salts")

    def get(self, name: str) -> PasswordRecord:
        path = self._path(name)
        if not path.exists():
            raise errors.NotFound(f"{name!r} has no password")
        try:
            return msgspec.json.decode(
                private_files.read(path, f"the password of {name!r}"), type=PasswordRecord
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.InvalidInput(f"{path} is damaged: {error}", hint="set the password again") from None

    def current(self, name: str) -> PasswordRecord:
        """The record, with the role that its identity permits now; `errors.Unauthorized` if it is revoked."""
        return self._limited(self.get(name))

    def _limited(self, record: PasswordRecord) -> PasswordRecord:
        role = record.role if self.identities is None else self.identities.role(record.name, record.role)
        administers = record.administers and role is roles.Role.OPERATOR
        return msgspec.structs.replace(record, role=role, administers=administers)

    def remove(self, name: str) -> None:
        if self.identities is not None:
            self.identities.check_changes()
        self.get(name)
        self._path(name).unlink(missing_ok=True)

    def records(self) -> dict[str, str]:
        """All records, for a gateway on another machine."""
        return {name: self._path(name).read_text() for name in self.names()}

    def digest(self) -> str:
        """Differs after any change of the records."""
        paths = sorted(self._folder.glob("*.json"))
        seen = tuple(
            (path.name, state.st_mtime_ns, state.st_ino) for path in paths for state in [path.stat()]
        )
        if self._digest is None or self._digest[0] != seen:
            made = hashlib.sha256()
            for name, text in self.records().items():
                made.update(f"{name} {len(text)} {text}\n".encode())
            self._digest = seen, made.hexdigest()
        return self._digest[1]

    def adopt(self, records: Mapping[str, str]) -> None:
        """Have these records and no others, on a machine that joined."""
        for name in set(self.names()) - set(records):
            self._path(name).unlink(missing_ok=True)
        for name, text in records.items():
            private_files.replace_file(self._path(name), text.encode())

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{subjects.token(name)}.json"


def _scrypt(password: bytes, salt: bytes, log_n: int, r: int, p: int) -> bytes:
    memory = 256 * r * (1 << log_n)  # twice the required memory: a limit that OpenSSL needs
    return hashlib.scrypt(password, salt=salt, n=1 << log_n, r=r, p=p, maxmem=memory, dklen=32)


# A verifier without an account: a digest that no password has, checked at the same cost as a real one.
_NOBODY = ScryptVerifier(bytes(_SALT_BYTES), _SCRYPT_LOG_N, _SCRYPT_R, _SCRYPT_P, bytes(32))
