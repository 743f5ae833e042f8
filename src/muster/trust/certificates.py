"""The domain's certificates, made and renewed by Muster itself.

    ca.pem        the authority's key and certificate
    bundle.pem    every authority that is still believed: what clients and brokers verify against
    <name>.pem    a process's key, its certificate and what links that to an older authority

Key and certificate share one file, because then one atomic replacement changes both, and a server that
reloads at any time reads a matching pair.

Rotating the authority needs no simultaneous change of all processes: the old authority signs the key of the
new one (a *cross certificate*), and every new certificate contains that. A client that still has only the old
bundle follows the chain; one with the new bundle does not need it.

Due actions are data (`CertificateStatus`): the deciding functions get the time from the caller.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import ipaddress
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muster.core import errors, subjects
from muster.core.net import tls
from muster.trust import private_files

DAY_S = 86400.0
WARNING_DAYS = (1, 7, 30)  # the smallest reached threshold is reported

# Fresh certificates are valid a little in the past, for machines whose clocks are behind.
_BACKDATE_S = 300.0

_CA = "ca"
_BUNDLE = "bundle"


@dataclass(frozen=True, slots=True)
class CertificateStatus:
    """The remaining lifetime of a certificate. ``warning_days`` is 30, 7, 1 or 0 (expired); None: no
    warning."""

    name: str
    expires_at: float
    days_left: float
    warning_days: int | None
    due: bool  # it should be renewed now


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """The files for TLS; ``path`` has certificate and key in one file."""

    path: pathlib.Path
    bundle: pathlib.Path


class CertificateKey:
    """A key for a certificate that another machine signs. Its private half stays here."""

    def __init__(self) -> None:
        self.private = ec.generate_private_key(ec.SECP256R1())

    @property
    def public(self) -> str:
        return (
            self.private.public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode()
        )


@dataclass(frozen=True, slots=True)
class _Signed:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...] = ()

    def pem(self) -> bytes:
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return key + _pem(self.certificate, *self.chain)


def status(
    name: str, certificate: x509.Certificate, *, now: float, renew_at: float = 2 / 3
) -> CertificateStatus:
    begins = certificate.not_valid_before_utc.timestamp()
    ends = certificate.not_valid_after_utc.timestamp()
    days_left = (ends - now) / DAY_S
    reached = [days for days in (0, *WARNING_DAYS) if days_left <= days]
    # A certificate that is not valid yet was made while the clock was ahead.
    due = now < begins or now >= begins + (ends - begins) * renew_at
    return CertificateStatus(name, ends, days_left, reached[0] if reached else None, due)


def pin(text: bytes) -> str:
    """The fingerprint of the public key of a certificate, the first of ``text``, as brokers compare it."""
    certificate = x509.load_pem_x509_certificates(text)[0]
    public = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(public).hexdigest()


async def keep_current(served: tls.RenewableTls, *, look_s: float = tls.LOOK_S) -> None:
    """Have a listener use the certificate that its files hold, for as long as this runs."""
    while True:
        served.refresh()
        await asyncio.sleep(look_s)


class CertificateStore:
    """A certificate authority in a folder, and the certificates that it has signed."""

    def __init__(self, folder: pathlib.Path, domain: str, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._domain = domain
        self._clock = clock

    @classmethod
    def create(
        cls, folder: pathlib.Path, domain: str, *, lifetime_s: float, clock: Callable[[], float] = time.time
    ) -> CertificateStore:
        made = cls(folder, subjects.token(domain), clock=clock)
        if (folder / "ca.pem").exists():
            raise errors.AlreadyExists(f"{folder} has a certificate authority already", hint="rotate it")
        authority = _authority(domain, 1, clock(), lifetime_s)
        private_files.replace_file(
            folder / "bundle.pem", _pem(authority.certificate), mode=private_files.PUBLIC
        )
        private_files.replace_file(
            folder / "ca.pem", authority.pem()
        )  # last: it is what makes the rest count
        return made

    @property
    def bundle(self) -> pathlib.Path:
        return self._folder / "bundle.pem"

    def ensure(
        self,
        name: str,
        hosts: Sequence[str],
        *,
        lifetime_s: float = 90 * DAY_S,
        renew_at: float = 2 / 3,
    ) -> bool:
        """Make the certificate if it is missing, due, for other hosts or of an older authority.

        True if the file changed: servers must reload then.
        """
        path = self.pair(name).path
        names = _names(hosts)
        with private_files.locked(self._folder):
            authority = self._load(_CA)
            if path.exists():
                held = self._load(name).certificate
                fits = _issued_by(held, authority.certificate) and _hosts(held) == set(names)
                if fits and not status(name, held, now=self._clock(), renew_at=renew_at).due:
                    return False
            key = ec.generate_private_key(ec.SECP256R1())
            leaf = _leaf(authority, name, names, key.public_key(), self._clock(), lifetime_s)
            private_files.replace_file(path, _Signed(key, leaf, authority.chain).pem())
            return True

    def sign(
        self, name: str, hosts: Sequence[str], public_key: str, *, lifetime_s: float = 90 * DAY_S
    ) -> str:
        """The certificate, with its chain, for a key that another machine has made."""
        try:
            public = serialization.load_pem_public_key(public_key.encode())
        except ValueError as error:
            raise errors.InvalidInput(f"not a public key: {error}") from error
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
            raise errors.InvalidInput("the key of a certificate must be on the curve P-256")
        with private_files.locked(self._folder):
            authority = self._load(_CA)
            leaf = _leaf(authority, name, _names(hosts), public, self._clock(), lifetime_s)
        return _pem(leaf, *authority.chain).decode()

    def adopt_bundle(self, text: str) -> None:
        """Of the authority on another machine."""
        if not self.bundle.exists() or self.bundle.read_text() != text:
            private_files.replace_file(self.bundle, text.encode(), mode=private_files.PUBLIC)

    def adopt(self, name: str, key: CertificateKey, chain: str) -> None:
        """Store a certificate that the authority on another machine has signed for this key."""
        certificate, *others = x509.load_pem_x509_certificates(chain.encode())
        signed = _Signed(key.private, certificate, tuple(others))
        private_files.replace_file(self.pair(name).path, signed.pem())

    def is_due(self, name: str, *, renew_at: float = 2 / 3) -> bool:
        return status(name, self._load(name).certificate, now=self._clock(), renew_at=renew_at).due

    def pair(self, name: str) -> CertificatePair:
        if subjects.token(name) in (_CA, _BUNDLE):
            raise errors.InvalidInput(f"{name!r} is the authority's own: choose another name")
        return CertificatePair(self._folder / f"{name}.pem", self.bundle)

    def rotate(self, *, lifetime_s: float) -> None:
        """A new authority. Certificates of the old one stay good; `ensure` replaces them one by one.

        An authority that has expired links to nothing: clients then need the new bundle.
        """
        now = self._clock()
        with private_files.locked(self._folder):
            old = self._load(_CA)
            generation = int(_common_name(old.certificate).rpartition(" ")[2]) + 1
            new = _authority(self._domain, generation, now, lifetime_s)
            links: tuple[x509.Certificate, ...] = ()
            if _unexpired([old.certificate], now):
                links = (_cross(new, old), *_unexpired(old.chain, now))  # back to the oldest that counts
            believed = _unexpired(self._believed(), now)
            # The bundle first: it must contain the new authority before a certificate that it signed is used.
            private_files.replace_file(
                self.bundle, _pem(new.certificate, *believed), mode=private_files.PUBLIC
            )
            private_files.replace_file(
                self._folder / "ca.pem", _Signed(new.key, new.certificate, links).pem()
            )

    def authority_status(self, *, renew_at: float = 2 / 3) -> CertificateStatus:
        return status(_CA, self._load(_CA).certificate, now=self._clock(), renew_at=renew_at)

    def report(self, *, renew_at: float = 2 / 3) -> list[CertificateStatus]:
        """The state of every certificate here; the authority's is called ``ca``."""
        names = sorted(path.stem for path in self._folder.glob("*.pem") if path.stem != _BUNDLE)
        now = self._clock()
        return [status(name, self._load(name).certificate, now=now, renew_at=renew_at) for name in names]

    def _load(self, name: str) -> _Signed:
        path = self._folder / f"{name}.pem"
        data = private_files.read(path, f"the certificate {name!r}")
        try:
            key = serialization.load_pem_private_key(data, None)
            certificate, *chain = x509.load_pem_x509_certificates(data)
        except (ValueError, TypeError) as error:
            raise errors.InvalidInput(
                f"{path} is damaged: {error}", hint="restore it from a backup"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise errors.InvalidInput(f"{path}: the key is not that of the certificate")
        return _Signed(key, certificate, tuple(chain))

    def _believed(self) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(
                private_files.read(self.bundle, "the bundle of authorities")
            )
        except ValueError as error:
            raise errors.InvalidInput(f"{self.bundle} is damaged: {error}") from error


def _authority(domain: str, generation: int, now: float, lifetime_s: float) -> _Signed:
    key = ec.generate_private_key(ec.SECP256R1())
    # Each generation has its own name, so that a verifier never tries the key of one on a signature of
    # another.
    name = _name(f"Muster {domain} authority {generation}")
    builder = _authority_builder(name, name, key.public_key(), key, now, now + lifetime_s)
    return _Signed(key, builder.sign(key, hashes.SHA256()))


def _cross(new: _Signed, old: _Signed) -> x509.Certificate:
    begins, ends = new.certificate.not_valid_before_utc, old.certificate.not_valid_after_utc
    subject, issuer = new.certificate.subject, old.certificate.subject
    ends = min(ends, new.certificate.not_valid_after_utc)
    builder = _authority_builder(
        subject, issuer, new.key.public_key(), old.key, begins.timestamp() + _BACKDATE_S, ends.timestamp()
    )
    return builder.sign(old.key, hashes.SHA256())


def _authority_builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    now: float,
    ends: float,
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(subject, issuer, public, signer, now, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
    )


def _leaf(
    authority: _Signed,
    name: str,
    names: Sequence[x509.GeneralName],
    public: ec.EllipticCurvePublicKey,
    now: float,
    lifetime_s: float,
) -> x509.Certificate:
    ends = min(now + lifetime_s, authority.certificate.not_valid_after_utc.timestamp())
    if ends <= now:
        raise errors.Refused("the domain's certificate authority has expired", hint="rotate it")
    # Both: brokers are servers to clients and clients to one another.
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = (
        _builder(_name(name), authority.certificate.subject, public, authority.key, now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(both, critical=False)
    )
    return builder.sign(authority.key, hashes.SHA256())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    now: float,
    ends: float,
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_utc(now - _BACKDATE_S))
        .not_valid_after(_utc(ends))
        .add_extension(identifier, critical=False)
        .add_extension(issued_by, critical=False)
    )


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    if not hosts:
        raise errors.InvalidInput("a certificate needs at least one host name or address")
    return [_host(host) for host in dict.fromkeys(hosts)]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # not an IP address, so it must be a name
    try:
        ascii_name = host.encode("idna").decode()
        if not ascii_name or any(c.isspace() or c in "/@:" for c in ascii_name):
            raise ValueError("not a host name")
        return x509.DNSName(ascii_name)
    except ValueError as error:
        raise errors.InvalidInput(f"{host[:100]!r} is neither an address nor a host name: {error}") from None


def _issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """By its key: a new authority may have the name of an older one."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, exceptions.InvalidSignature):
        return False
    return True


def _hosts(certificate: x509.Certificate) -> set[x509.GeneralName]:
    return set(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def _name(text: str) -> x509.Name:
    # X.509 gives a common name 64 characters; the names that are verified are the alternative ones.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text if len(text) <= 64 else text[-64:])])


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _unexpired(certificates: Iterable[x509.Certificate], now: float) -> list[x509.Certificate]:
    return [each for each in certificates if each.not_valid_after_utc.timestamp() > now]


def _pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
