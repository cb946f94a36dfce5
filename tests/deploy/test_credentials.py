"""Certificates and keys: who trusts whom, who may read what, and what stays when the folder is made again."""

import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from deploy import credentials
from deploy.credentials import make_credentials
from fedivon_flwr.errors import UserError


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(folder: Path) -> set[str]:
    found = certificate(folder / "server/server.crt").extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return {str(name.value) for name in found.value}


def test_the_authority_vouches_for_the_server_and_its_hosts(tmp_path: Path) -> None:
    make_credentials(tmp_path, ["link.example.org", "10.0.0.7", "fd00::7"], ["a"])
    authority, server = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server/server.crt")
    server.verify_directly_issued_by(authority)
    assert names(tmp_path) == {"localhost", "127.0.0.1", "link.example.org", "10.0.0.7", "fd00::7"}
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
        tmp_path / "server/server.crt", tmp_path / "server/server.key"
    )


def test_every_machine_gets_what_it_needs_and_no_more(tmp_path: Path) -> None:
    make_credentials(tmp_path, [], ["a", "b"])
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    server = {"server/ca.crt", "server/server.crt", "server/server.key", "server/nodes/a.pub", "server/nodes/b.pub"}
    nodes = {f"nodes/{name}/{file}" for name in "ab" for file in ("ca.crt", "node.key", "node.pub")}
    assert files == {"ca.crt", "ca.key"} | server | nodes
    for file in files:
        mode = stat.S_IMODE((tmp_path / file).stat().st_mode)
        assert mode == (0o600 if file.endswith(".key") else 0o644), file


def test_a_nodes_key_is_one_that_flower_takes(tmp_path: Path) -> None:
    made = make_credentials(tmp_path, [], ["a"])
    private = load_ssh_private_key((made.node("a") / "node.key").read_bytes(), password=None)
    public = load_ssh_public_key((made.server / "nodes/a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_made_again_it_keeps_the_authority_and_the_nodes(tmp_path: Path) -> None:
    make_credentials(tmp_path, ["one.example"], ["a"])
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.key", "ca.crt", "nodes/a/node.key")}
    make_credentials(tmp_path, ["two.example"], ["b"])
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert {"one.example", "two.example", "localhost"} <= set(names(tmp_path))
    assert sorted(path.name for path in (tmp_path / "server/nodes").iterdir()) == ["a.pub", "b.pub"]
    certificate(tmp_path / "server/server.crt").verify_directly_issued_by(certificate(tmp_path / "ca.crt"))


def test_what_needs_no_change_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("server/server.crt", "server/server.key")
    make_credentials(tmp_path, ["one.example"], ["a"])
    before = [(tmp_path / name).read_bytes() for name in files]
    make_credentials(tmp_path, [], ["b"])
    assert [(tmp_path / name).read_bytes() for name in files] == before
    monkeypatch.setattr(credentials, "RENEW_DAYS", 1000)  # so that it ends soon
    make_credentials(tmp_path, [], [])
    assert not set(before) & {(tmp_path / name).read_bytes() for name in files}
    assert "one.example" in names(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("ca.key", "x"), ("ca.crt", "x"), ("server/server.crt", "x")])
def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path, name: str, content: str) -> None:
    make_credentials(tmp_path, [], [])
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="is damaged"):
        make_credentials(tmp_path, [], [])


@pytest.mark.parametrize(
    ("hosts", "nodes", "message"),
    [
        (["https://a.example"], [], "The host 'https://a.example' is neither an address nor a name"),
        (["a.example:8000"], [], "without scheme and port"),
        ([], ["../a"], "The node's name '../a' must begin with"),
        ([], [""], "The node's name ''"),
    ],
)
def test_names_that_are_wrong(tmp_path: Path, hosts: list[str], nodes: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_credentials(tmp_path / "new", hosts, nodes)
    assert message in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    make_credentials(tmp_path, [], [])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(UserError, match=r"only one of ca\.key and ca\.crt"):
        make_credentials(tmp_path, [], [])


def test_openssl_agrees(tmp_path: Path) -> None:
    make_credentials(tmp_path, ["link.example.org"], [])
    command = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "link.example.org", "server/server.crt"]
    try:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert done.returncode == 0, done.stderr
