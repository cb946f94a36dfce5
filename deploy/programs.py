"""The programs of a federation, with all their options: scripts, systemd, Docker and the tests start them through here.

On the SuperLink's machine: ``superlink`` carries the messages and listens on this machine only, ``superexec`` runs the
ServerApp in a process of its own (so that a run survives a restart of the SuperLink), and ``proxy`` is what the
nodes see: it passes on Flower's fleet API and nothing else, since whoever reaches the control API can submit runs.
On a node's machine: ``supernode``.
"""

import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fedivon_flwr.errors import UserError

Scalar = str | int | float | bool
RESTART_SECONDS = 5.0
ADMIN_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
LARGEST_REQUEST = "64m"  # Flower sends arrays in pieces of 5 MB, and reads a request before it asks who sends it


@dataclass(frozen=True)
class Security:
    """What a machine was given of the federation's credentials; none means no encryption, on this machine only."""

    folder: Path | None

    @classmethod
    def of(cls, folder: Path | None, insecure: bool | None, needed: Sequence[str], *addresses: str) -> "Security":
        """The credentials in a folder, or none if the user insists (and may), and nothing leaves this machine."""
        if folder is None and not insecure:
            other = "" if insecure is None else ", or --insecure"
            raise UserError(f"Give --credentials, a folder that `fedivon deploy credentials` made{other}.")
        if folder is not None and insecure:
            raise UserError("Give either credentials or --insecure, not both.")
        if folder is None:
            if outside := next((address for address in addresses if not is_local(address)), None):
                raise UserError(f"Without credentials nothing may leave this machine, but '{outside}' does.")
            return cls(None)
        check_files(folder, needed)
        return cls(folder.resolve())

    def path(self, name: str) -> str:
        """One of the files."""
        assert self.folder is not None
        return str(self.folder / name)

    @property
    def authority(self) -> Path | None:
        """The certificate to trust."""
        return self.folder / "ca.crt" if self.folder else None

    def trusted(self) -> list[str]:
        """Options of a program that connects."""
        return ["--root-certificates", self.path("ca.crt")] if self.folder else ["--insecure"]


SERVER_FILES = ("ca.crt", "server.crt", "server.key")
NODE_FILES = ("ca.crt", "node.key")


def is_local(address: str) -> bool:
    """Whether an address (HOST or HOST:PORT) is of this machine's loopback.

    >>> [is_local(each) for each in ("localhost:8000", "127.0.0.1", "[::1]:80", "::1", "10.0.0.7:8000", "a.example")]
    [True, True, True, True, False, False]
    """
    host = address.rpartition(":")[0] if address.count(":") == 1 or address.startswith("[") else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_files(folder: Path, needed: Sequence[str]) -> None:
    """Refuse credentials that are not all there, or not ours alone."""
    for name in needed:
        file = folder / name
        try:
            mode = file.stat().st_mode
            if not os.access(file, os.R_OK):
                raise PermissionError
        except FileNotFoundError:
            raise UserError(
                f"The folder '{folder}' has no {name}; copy there what `fedivon deploy credentials` made for this "
                "machine."
            ) from None
        except OSError:
            raise UserError(f"'{file}' may not be read by you; use the account to which it belongs.") from None
        if name.endswith(".key") and mode & 0o077:
            raise UserError(f"Others may read the private key '{file}'; run: chmod 600 '{file}'.")


def superlink(security: Security, state: Path, host: str, port: int) -> list[str]:
    """Carries messages; its database lets it go on after a restart."""
    command = ["flower-superlink", "--host", host, "--port", str(port)]
    command += ["--isolation", "process", "--database", str(state / "superlink.db")]
    if security.folder is None:
        return [*command, "--insecure"]
    tls = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
    files = [part for option, name in tls.items() for part in (option, security.path(name))]
    return [*command, *files, "--enable-supernode-auth"]


def superexec(security: Security, address: str) -> list[str]:
    """Starts the ServerApp of a run."""
    return ["flower-superexec", "--runtime-api-address", address, *security.trusted()]


def supernode(security: Security, address: str, node: Mapping[str, Scalar], port: int) -> list[str]:
    """Waits for messages, and starts the ClientApp for each."""
    command = ["flower-supernode", "--superlink", address, "--port", str(port), *security.trusted()]
    if security.folder is not None:
        command += ["--auth-supernode-private-key", security.path("node.key")]
    return [*command, "--node-config", node_config(node)]


def node_config(node: Mapping[str, Scalar]) -> str:
    """What a node knows of itself, as Flower's command line wants it.

    >>> node_config({"data": "/srv/own.npz", "partition-id": 3})
    'data="/srv/own.npz" partition-id=3'
    """
    if odd := next((value for value in node.values() if not is_plain(str(value))), None):
        raise UserError(f"The path '{odd}' has a quotation mark or backslash, which Flower does not take; use another.")
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in node.items())


def is_plain(path: str) -> bool:
    """Whether a path can stand between quotation marks in what Flower and nginx read."""
    return path.isprintable() and not set(path) & set('"\\')


def proxy(security: Security, state: Path, listen: int, upstream: str) -> list[str]:
    """Lets nodes in from outside, and nobody else: nginx with a configuration of its own."""
    if (program := nginx()) is None:
        raise UserError("The program 'nginx' is not installed; install it with the system's package manager.")
    if odd := next((path for path in (state, security.folder) if "$" in str(path) or not is_plain(str(path))), None):
        raise UserError(f"The path '{odd}' has a dollar, quotation mark or backslash, which nginx does not take.")
    file = state / "nginx.conf"
    state.mkdir(parents=True, exist_ok=True)
    file.write_text(proxy_config(security, state, listen, upstream))
    return [program, "-e", "stderr", "-p", str(state), "-c", str(file)]


def nginx() -> str | None:
    """Where nginx is: not everybody has the folders for administrators in the search path."""
    return shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *ADMIN_FOLDERS]))


def proxy_config(security: Security, state: Path, listen: int, upstream: str) -> str:
    """nginx' configuration."""
    places = "".join(
        f'    {kind}_temp_path "{state / kind}";\n' for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    six = f"        listen [::]:{listen} ssl;\n" if has_ipv6() else ""
    return f"""\
daemon off;
worker_processes 1;
pid "{state / "nginx.pid"}";
error_log stderr;
events {{}}
http {{
    access_log off;
    server_tokens off;
{places}\
    server {{
        listen {listen} ssl;
{six}\
        ssl_certificate "{security.path("server.crt")}";
        ssl_certificate_key "{security.path("server.key")}";
        ssl_protocols TLSv1.2 TLSv1.3;
        location /v1/fleet/ {{
            client_max_body_size {LARGEST_REQUEST};
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_http_version 1.1;
            proxy_read_timeout 1h;
            proxy_send_timeout 1h;
            proxy_pass https://{upstream}/v1/fleet/;  # with this path, and nothing that a client made of it
            proxy_ssl_name localhost;  # in each of our certificates; nginx does not look for addresses in them
            proxy_ssl_server_name on;
            proxy_ssl_trusted_certificate "{security.path("ca.crt")}";
            proxy_ssl_verify on;
        }}
        location / {{
            return 403;
        }}
    }}
}}
"""


def has_ipv6() -> bool:
    """Whether this machine has IPv6; where it has not, nginx does not start with an address of it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def supervise(command: Sequence[str], env: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run a program, and start it again when it ends by itself, until we are told to stop.

    Flower refuses a node that was killed and comes back for about a minute, so a program that ends is no reason to
    give up. Gives the exit code of a program that was told to stop.
    """
    stopping = False
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if process is not None:  # Flower's programs would not take their leave if the terminal is gone
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    while not stopping:
        # In a group of its own: a Ctrl-C of the terminal reaches it once, through us.
        try:
            process = subprocess.Popen(command, env=dict(env), process_group=0)
        except OSError as error:
            raise UserError(f"The program '{command[0]}' cannot be started ({error.strerror}).") from None
        if stopping:  # told so while it was being started
            process.terminate()
        code = process.wait()
        with suppress(ProcessLookupError):  # a SuperNode that shuts itself down leaves what it has started
            os.killpg(process.pid, signal.SIGKILL)
        if stopping:
            return 0 if code == -signal.SIGTERM else code  # as we told it
        # So ends a node whose signature the SuperLink takes for an old one.
        clock = "" if code else " Nobody told it to end: is this machine's clock right?"
        say(f"{command[0]} ended with code {code}; it is started again in {RESTART_SECONDS:g} s.{clock}")
        give_up = time.monotonic() + RESTART_SECONDS
        while not stopping and time.monotonic() < give_up:
            time.sleep(0.1)
    return 0
