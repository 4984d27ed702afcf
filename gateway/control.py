"""The command line's side of a running service: where it listens, its admin token, and questions to it."""

import errno
import http.client
import secrets
import socket
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from msgspec import Struct

from gateway.config import LOOPBACK_HOSTS, Settings
from gateway.private_files import FileNotPrivate, read_private, write_private
from gateway.status import AdminStatus

_ANSWER_SECONDS = 10.0
_BACKLOG = 2048
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (read as an address to call, not to listen on)


class ControlError(Exception):
    """The service cannot be asked, or its port cannot be had. One line that says what to do."""


class ServiceAddress(Struct, frozen=True, kw_only=True):
    """How to reach a running service. `port` is the one it really got."""

    pid: int
    host: str
    port: int


def service_url(settings: Settings, address: ServiceAddress) -> str:
    """Where a client on this machine reaches the service, without a path: by a name that it serves."""
    if settings.allowed_hosts and address.host not in LOOPBACK_HOSTS:
        return f"http://{settings.allowed_hosts[0]}:{address.port}"
    host = _EVERY_ADDRESS.get(address.host, address.host)
    return f"http://[{host}]:{address.port}" if ":" in host else f"http://{host}:{address.port}"


def announce_service(settings: Settings, address: ServiceAddress) -> None:
    """Called by the service once it listens. A later one replaces it."""
    write_private(settings.service_path, msgspec.json.encode(address))


def withdraw_service(settings: Settings, *, pid: int) -> None:
    """Called by the service when it ends. Leaves the announcement of another one alone."""
    try:
        address = announced_service(settings)
    except ControlError:
        return
    if address.pid == pid:
        settings.service_path.unlink(missing_ok=True)
        settings.admin_token_path.unlink(missing_ok=True)


def make_admin_token(path: Path) -> str:
    """A fresh token for this start of the service, in a file that only its owner reads."""
    token = secrets.token_urlsafe(32)
    write_private(path, token.encode())
    return token


class ServiceAnswer(Struct, frozen=True, kw_only=True):
    """What the running service answered."""

    status: int
    body: bytes


def fetch_status(settings: Settings) -> AdminStatus:
    """Ask the running service. Raises ControlError."""
    address = announced_service(settings)
    answer = ask_service(settings, "GET", "/admin/status", token=read_admin_token(settings))
    if answer.status != http.client.OK:
        raise ControlError(
            f"port {address.port} answered {answer.status}: another program may listen there; restart mlxd serve"
        )
    try:
        return msgspec.json.decode(answer.body, type=AdminStatus)
    except msgspec.DecodeError as why:
        raise ControlError(f"the service is of another version ({why}); restart it") from None


def read_admin_token(settings: Settings) -> str:
    """The running service's. Raises ControlError."""
    try:
        return read_private(settings.admin_token_path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError, FileNotPrivate) as why:
        raise ControlError(f"no admin token ({why}); restart mlxd serve, as the user you are now") from None


def ask_service(
    settings: Settings,
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    *,
    token: str | None,
    body: bytes | None = None,
    timeout_seconds: float = _ANSWER_SECONDS,
) -> ServiceAnswer:
    """One exchange with the running service, as whoever the token or key says. Raises ControlError."""
    address = announced_service(settings)
    # The name stands in for the address: a service may serve certain hosts only, and always this one.
    headers = {"Host": _host_to_name(settings, address)}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection = http.client.HTTPConnection(
        _EVERY_ADDRESS.get(address.host, address.host), address.port, timeout=timeout_seconds
    )
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return ServiceAnswer(status=answer.status, body=answer.read())
    except (OSError, http.client.HTTPException) as why:
        raise ControlError(
            f"no answer from {address.host} port {address.port} ({type(why).__name__}); "
            f"is process {address.pid} alive? Start it with `mlxd serve`"
        ) from None
    finally:
        connection.close()


def open_port(host: str, port: int) -> socket.socket:
    """A listening socket for the service. Raises ControlError with one line that names the port and who holds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Its protocol is named since asyncio switches Nagle's algorithm off only for sockets that say they are TCP. With it
    # on, each answer of two writes waits some 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as why:
        listener.close()
        raise ControlError(_no_port(host, port, why)) from None
    return listener


def _no_port(host: str, port: int, why: OSError) -> str:
    match why.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} on {host} is taken by {_holder_of(port)}: "
                "stop that, or choose another with --port or `port` in mlxd.toml"
            )
        case errno.EACCES:
            return f"port {port} needs more rights than this user has: choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}: choose another with --host, for instance 127.0.0.1"
        case _:
            return f"cannot listen on {host} port {port} ({why.strerror or why}): choose another with --host or --port"


def _holder_of(port: int) -> str:
    """Best effort: macOS shows other users' sockets to root alone."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port:
                return f"process {connection.pid}" if connection.pid else "a process of another user"
    except (psutil.Error, OSError):
        return "another process (only root may see which)"
    return "another process"


def announced_service(settings: Settings) -> ServiceAddress:
    """Where the running service listens. Raises ControlError when there is none."""
    path = settings.service_path
    try:
        address = msgspec.json.decode(read_private(path), type=ServiceAddress)
    except FileNotFoundError:
        raise ControlError(
            "mlxd is not running (with this home and runtime directory); start it with `mlxd serve`"
        ) from None
    except (OSError, FileNotPrivate, msgspec.DecodeError) as why:
        raise ControlError(f"{path} is of no use ({why}); restart mlxd serve") from None
    if not psutil.pid_exists(address.pid):
        raise ControlError(f"mlxd ended without a goodbye (it was process {address.pid}); start it with `mlxd serve`")
    return address


def _host_to_name(settings: Settings, address: ServiceAddress) -> str:
    if settings.allowed_hosts and not settings.is_loopback:
        return settings.allowed_hosts[0]
    return f"localhost:{address.port}"
