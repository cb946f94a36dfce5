"""Certificates and keys of a federation: an authority of its own, a server, and a key for every node.

    <folder>/ca.crt, ca.key            the authority; ca.key stays where it was made
    <folder>/server/                   for the SuperLink's machine: ca.crt, server.crt, server.key, nodes/<name>.pub
    <folder>/nodes/<name>/             for that node's machine: ca.crt, node.key, node.pub

Made again with more hosts or nodes, the folder keeps its authority and the keys that are there.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedivon_flwr.errors import UserError

LOCAL = ("localhost", "127.0.0.1")  # how the programs on the SuperLink's own machine reach it
AUTHORITY_DAYS, SERVER_DAYS, RENEW_DAYS = 3650, 825, 90


@dataclass(frozen=True)
class Credentials:
    """A federation's folder of certificates and keys."""

    folder: Path

    @property
    def server(self) -> Path:
        """What goes to the SuperLink's machine."""
        return self.folder / "server"

    def node(self, name: str) -> Path:
        """What goes to a node's machine."""
        return self.folder / "nodes" / name


def make_credentials(folder: Path, hosts: Sequence[str], nodes: Sequence[str]) -> Credentials:
    """Make what is missing; the server's certificate is made anew if there are new hosts, or if it ends soon."""
    made = Credentials(folder)
    for name in nodes:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            raise UserError(f"The node's name '{name}' must begin with a letter or digit and go on with those, '.-_'.")
    names = [san(host) for host in dict.fromkeys([*LOCAL, *hosts])]
    try:
        key, certificate = _authority(folder)
        made.server.mkdir(parents=True, exist_ok=True)
        known, lasting = _certified(made.server / "server.crt")
        if not lasting or not set(names) <= set(known) or not (made.server / "server.key").exists():
            _server(made.server, list(dict.fromkeys([*known, *names])), key, certificate)
        for name in nodes:
            _node(made, name)
        authority = (folder / "ca.crt").read_bytes()
        for place in (made.server, *(path for path in (folder / "nodes").glob("*"))):
            write_public(place / "ca.crt", authority)
    except OSError as error:
        raise UserError(f"The credentials cannot be written to '{folder}' ({error.strerror}).") from None
    return made


def san(host: str) -> x509.GeneralName:
    """A host as a certificate names it: an address, or a DNS name.

    >>> san("10.0.0.7"), san("link.example.org")
    (<IPAddress(value=10.0.0.7)>, <DNSName(value='link.example.org')>)
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(?!-)[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", host):
        raise UserError(f"The host '{host}' is neither an address nor a name; give it without scheme and port.")
    return x509.DNSName(host)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A private key on the curve P-384, which Flower takes for nodes."""
    return ec.generate_private_key(ec.SECP384R1())


def _certified(file: Path) -> tuple[list[x509.GeneralName], bool]:
    """The hosts in a certificate, if there is one, and whether it will last for a while."""
    if not file.exists():
        return [], False
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        raise UserError(f"The certificate '{file}' is damaged; remove it, and a new one is made.") from None
    hosts = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    return hosts, certificate.not_valid_after_utc > datetime.now(UTC) + timedelta(days=RENEW_DAYS)


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_file, file = folder / "ca.key", folder / "ca.crt"
    if key_file.exists() and file.exists():
        try:
            key = load_pem_private_key(key_file.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise UserError(f"ca.key or ca.crt in '{folder}' is damaged, or not made by us; give a new folder.")
        return key, certificate
    if key_file.exists() or file.exists():
        raise UserError(
            f"The folder '{folder}' has only one of ca.key and ca.crt; give a new folder, or add the other."
        )
    folder.mkdir(parents=True, exist_ok=True)
    key = new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedIvon federation")])
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
    certificate = (
        _certificate(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    write_secret(key_file, pem(key))
    write_public(file, certificate.public_bytes(Encoding.PEM))
    return key, certificate


def _server(
    folder: Path,
    names: Sequence[x509.GeneralName],
    authority: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate,
) -> None:
    key = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink")])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    certificate = (
        _certificate(subject, issuer.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / "server.key").unlink(missing_ok=True)  # it comes last: without it, both are made anew
    write_public(folder / "server.crt", certificate.public_bytes(Encoding.PEM))
    write_secret(folder / "server.key", pem(key))


def _node(made: Credentials, name: str) -> None:
    folder = made.node(name)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node.key").exists():
        key = new_key()
        write_public(folder / "node.pub", key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
        write_secret(folder / "node.key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    known = made.server / "nodes"
    known.mkdir(exist_ok=True)
    write_public(known / f"{name}.pub", (folder / "node.pub").read_bytes())


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as OpenSSL reads it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    scratch.replace(path)


def write_public(path: Path, data: bytes) -> None:
    """Write a file that everybody may read."""
    path.write_bytes(data)
    path.chmod(0o644)
