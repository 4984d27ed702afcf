"""What agents are told: enough to find the server, and a key only where others cannot read it."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client_guides import GUIDES, guide
from gateway.client_setups import AGENTS, FILES, KEY, KEY_VARIABLE, Server, file_text, with_files, with_key

ROOT = Path(__file__).parents[2]
SERVER = Server(url="http://studio.local:8321", model="org/some-model", context_tokens=65_536)
SECRET = "mlxd-secret"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_told_the_server_and_the_model(name: str) -> None:
    """By its arguments, its environment or its files; and where its window is told, it is the model's."""
    setup = AGENTS[name](SERVER)
    told = "\n".join((*setup.arguments, *setup.environment.values(), *(file.text for file in setup.files)))
    assert SERVER.url in told
    assert SERVER.model in told


@pytest.mark.parametrize("name", AGENTS)
def test_no_argument_holds_the_key(name: str) -> None:
    """Every process of a machine may read the arguments of every other; the key comes by other ways, and does come."""
    setup = AGENTS[name](SERVER)
    assert not any(KEY in argument for argument in setup.arguments)
    assert any(KEY in value for value in setup.environment.values()) or any(file.holds_key for file in setup.files)
    assert all(file.holds_key == (KEY in file.text) for file in setup.files)


@pytest.mark.parametrize("name", AGENTS)
def test_files_are_named_where_they_lie(name: str) -> None:
    """An agent with files is told their directory, and one without is told of none."""
    setup = AGENTS[name](SERVER)
    told = (*setup.arguments, *setup.environment.values())
    assert any(FILES in text for text in told) == bool(setup.files)


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("server", [SERVER, Server(url=SERVER.url, model=SERVER.model)])
def test_a_guide_names_the_server_and_no_placeholder_is_left(name: str, server: Server) -> None:
    """Whether the model's window is known or not."""
    text = guide(name, server)
    assert server.url in text
    assert KEY not in text
    assert FILES not in text
    assert "None" not in text


@given(key=st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), min_size=1))
def test_a_key_stays_a_key_in_json(key: str) -> None:
    """Whatever characters it has, a file that holds it reads back as it."""
    (file,) = AGENTS["cline"](SERVER).files
    read = msgspec.json.decode(file_text(file, key))
    assert read["providers"]["openai-compatible"]["settings"]["apiKey"] == key
    assert with_key(KEY, key) == key


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["authorization"] == f"Bearer {SECRET}"
        body = (
            b'{"data": [{"id": "m", "context_length": 5000, "capabilities": ["chat"]}, {"id": "e"}]}'
            if known
            else b"{}"
        )
        self.send_response(200 if known else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server that lists two models to whoever has the key, of which one writes."""
    with HTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _mlxd(home: Path, *arguments: str, key: str = SECRET) -> "subprocess.CompletedProcess[str]":
    environment = {
        "PATH": f"{home}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MLXD_HOME": str(home),
        KEY_VARIABLE: key,
    }
    command = [sys.executable, "-P", "-m", "gateway", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


def _program(home: Path, name: str) -> None:
    """Stands for an agent: prints its arguments, and the key that it was given."""
    path = home / name
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nprintf "key %s\\n" "$MLXD_KEY"\nexit 7\n')
    path.chmod(0o700)


def test_launch_becomes_the_agent(tmp_path: Path, url: str) -> None:
    """With the caller's arguments behind its own, the only model that writes, the key, and the agent's exit code."""
    _program(tmp_path, "codex")
    done = _mlxd(tmp_path, "launch", "codex", "--url", url, "--", "exec", "--model=x", "do it")
    assert done.returncode == 7, done.stderr
    *arguments, key = done.stdout.splitlines()
    assert arguments[-3:] == ["exec", "--model=x", "do it"]
    assert f'model_providers.mlxd.base_url="{url}/v1"' in arguments
    assert 'model="m"' in arguments
    assert key == f"key {SECRET}"


def test_files_that_launch_writes_are_private(tmp_path: Path, url: str) -> None:
    """0600, in mlxd's own home: a base configuration is never touched."""
    _program(tmp_path, "cline")
    assert _mlxd(tmp_path, "launch", "cline", "--url", url).returncode == 7
    path = tmp_path / "agents" / "cline" / "settings" / "providers.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (("launch", "emacs"), SECRET, "cannot be launched"),
        (("launch", "pi"), SECRET, "npm install -g"),
        (("launch", "codex"), "wrong", "wants a key"),
        (("connect", "emacs"), SECRET, "nothing is known"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, url: str, arguments: tuple[str, ...], key: str, said: str
) -> None:
    """That says what to do, and holds no key."""
    done = _mlxd(tmp_path, *arguments, "--url", url, key=key)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert key not in done.stderr


@pytest.mark.parametrize("name", AGENTS)
def test_a_guide_can_be_pasted_into_a_shell(tmp_path: Path, name: str) -> None:
    """It then starts the agent as launching would: the same arguments, environment and files, the key among them."""
    setup = AGENTS[name](SERVER)
    said = '#!/bin/sh\nprintf "%s\\n" "$#" "$@" > "$HOME/arguments"\nenv > "$HOME/environment"\n'
    (tmp_path / setup.program).write_text(said)
    (tmp_path / setup.program).chmod(0o700)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", KEY_VARIABLE: SECRET}
    done = subprocess.run(["sh", "-eu"], input=guide(name, SERVER), env=environment, text=True, check=False, timeout=30)
    assert done.returncode == 0

    directory = str(tmp_path / ".mlxd" / "agents" / name)
    count, *arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[: int(count)] == [with_files(argument, directory) for argument in setup.arguments]
    seen = dict(pair.split("=", 1) for pair in (tmp_path / "environment").read_text().splitlines() if "=" in pair)
    assert {name: with_key(value, SECRET) for name, value in setup.environment.items()}.items() <= seen.items()
    for file in setup.files:
        path = Path(directory, file.name)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text().rstrip() == file_text(file, SECRET).rstrip()


def test_connect_prints_no_key(tmp_path: Path, url: str) -> None:
    """A terminal's scrollback is no place for one."""
    done = _mlxd(tmp_path, "connect", "claude", "--url", f"{url}/v1/")
    assert done.returncode == 0, done.stderr
    assert f"export ANTHROPIC_BASE_URL={url}\n" in done.stdout
    assert SECRET not in done.stdout
