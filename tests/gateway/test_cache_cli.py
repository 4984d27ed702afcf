"""`mlxd warm`, `explain` and `cache …` against a service that runs: what they say, and that a key is in no argument."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import structlog
import uvicorn

from gateway.cache_cli import KEY_VARIABLE
from gateway.cli import main
from gateway.config import prepare_directories
from gateway.control import ServiceAddress, announce_service, open_port
from protocol.blocks import Describe, Forget, Forgotten, UnpinBlocks, Unpinned
from protocol.generation import ForgetHot, PinnedPrefix, SetBudget, Warm
from tests.gateway.http_parts import ADMIN_TOKEN, House, build_house, make_model
from tests.gateway.test_cache_routes import BOOKS, LOCAL, loaded

Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def house(runtime_directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """Announced and served, in this process."""
    monkeypatch.setenv("MLXD_HOME", str(runtime_directory))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    make_model(runtime_directory / "models" / "tiny")
    built = build_house(runtime_directory)
    built.caches.answers |= {
        Forget: Forgotten(call_id=1, blocks=4, file_bytes=40),
        UnpinBlocks: Unpinned(call_id=1, blocks=1),
        Describe: BOOKS,
    }
    hot = PinnedPrefix(owner=LOCAL, name="repo", tokens=300, size_bytes=9000)
    built.status.models = [loaded("tiny", hot)]
    prepare_directories(built.settings)
    built.settings.admin_token_path.write_text(ADMIN_TOKEN)
    built.settings.admin_token_path.chmod(0o600)
    listener = open_port("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(built.app, log_config=None, access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announce_service(built.settings, ServiceAddress(pid=os.getpid(), host="127.0.0.1", port=listener.getsockname()[1]))
    with structlog.testing.capture_logs():  # this service shares its standard output with the commands
        yield built
        server.should_exit = True
        await asyncio.wait_for(serving, 10)


@pytest.fixture
def mlxd(house: House, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        code = ended.value.code
        return code if isinstance(code, int) else 0 if code is None else 1

    async def command(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


async def test_warming_a_recipe(mlxd: Command, house: House, tmp_path: Path) -> None:
    """The service renders it; the command says what is warm now, and for how long."""
    (tmp_path / "r.toml").write_text('model = "tiny"\nsystem = "Be careful."\npin = {name = "repo", ttl = "8h"}\n')
    code, out, error = await mlxd("warm", str(tmp_path / "r.toml"))
    assert (code, error) == (0, "")
    assert "tiny: 300 tokens are warm (256 were before), 2 blocks, 4.1 kB, 1 on disk" in out
    assert "pinned as repo, 8 h 0 min" in out
    (warmed,) = house.generator.asked
    assert isinstance(warmed, Warm)
    assert warmed.pin is not None
    assert (warmed.pin.name, warmed.pin.ttl_seconds) == ("repo", 28_800)


async def test_a_key_comes_from_the_environment_or_a_file(
    mlxd: Command, house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S01: without one the service refuses, and the error says where to put it; a file that others may read is none."""
    key = house.add_key("ann")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Be careful.")
    asked = ("warm", str(prompt), "--model", "tiny")
    code, _, error = await mlxd(*asked)
    assert (code, KEY_VARIABLE in error, error.count("\n")) == (1, True, 1)
    file = tmp_path / "key"
    file.write_text(key + "\n")
    file.chmod(0o644)
    code, _, error = await mlxd(*asked, "--key-file", str(file))
    assert (code, "chmod 600" in error, key in error) == (1, True, False)
    file.chmod(0o600)
    assert (await mlxd(*asked, "--key-file", str(file)))[0] == 0
    monkeypatch.setenv(KEY_VARIABLE, key)
    assert (await mlxd(*asked))[0] == 0
    assert len({asked.cache.owner for asked in house.generator.asked}) == 1
    monkeypatch.setenv(KEY_VARIABLE, "two\nlines")
    code, _, error = await mlxd(*asked)
    assert (code, "two" in error) == (1, False)


async def test_explaining_a_request(mlxd: Command, house: House) -> None:
    """By the answer's id; an unknown one is one line."""
    async with house.client() as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    code, out, _ = await mlxd("explain", answer["id"])
    assert code == 0
    assert "on tiny: 0 of 3 reused" in out
    assert "first_request: no earlier request" in out
    code, _, error = await mlxd("explain", "req_of_somebody")
    assert (code, "No such request" in error, error.count("\n")) == (1, True, 1)


async def test_what_is_kept(mlxd: Command, house: House) -> None:
    """Books of both tiers, misses by reason, everybody's pins by key."""
    code, out, _ = await mlxd("cache", "status")
    assert code == 0
    for words in ("tiny", "absent 3", "3 blocks", "green", "repo", "local", "secret-plan", "another"):
        assert words in out
    code, out, _ = await mlxd("cache", "pins")
    assert (code, "secret-plan" in out) == (0, True)
    key = house.add_key("ann")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, key)
        code, out, error = await mlxd("cache", "pins")
    assert (code, out, "you pinned nothing" in error) == (0, "", True)


async def test_unpinning(mlxd: Command, house: House) -> None:
    """One's own; as the operator, another key's; what was not pinned is an error."""
    assert (await mlxd("cache", "unpin", "repo"))[:2] == (0, "repo is no longer pinned\n")
    assert (await mlxd("cache", "unpin", "repo", "--key", "local"))[0] == 0
    house.caches.answers[UnpinBlocks] = Unpinned(call_id=1, blocks=0)
    code, _, error = await mlxd("cache", "unpin", "unknown")
    assert (code, "mlxd cache pins" in error) == (1, True)


async def test_purging(mlxd: Command, house: House) -> None:
    """Says what it deleted; without criteria, or without a yes, it deletes nothing."""
    for arguments in ((), ("--all", "--model", "tiny"), ("--older-than", "soon")):
        code, _, error = await mlxd("cache", "purge", "--yes", *arguments)
        assert (code, error.count("\n")) == (1, 1)
    assert (await mlxd("cache", "purge", "--all"))[0] == 1  # nobody is there to say yes
    assert house.caches.asked == []
    code, out, _ = await mlxd("cache", "purge", "--yes", "--model", "tiny")
    assert (code, out) == (0, "deleted: 4 blocks on disk (40 B); memory of tiny\n")
    code, out, _ = await mlxd("cache", "purge", "--yes", "--older-than", "7d", "--key", "local")
    assert (code, out) == (0, "deleted: 4 blocks on disk (40 B)\n")
    assert (await mlxd("cache", "purge", "--yes", "--all"))[0] == 0
    first, second, third = house.caches.asked
    assert first == Forget(call_id=0, fingerprint="print of tiny", asked_by="admin")
    assert second == Forget(call_id=0, owner=LOCAL, unused_for_seconds=7 * 86_400, asked_by="admin")
    assert third == Forget(call_id=0, asked_by="admin")
    assert house.caches.told == [("tiny", ForgetHot()), ("tiny", ForgetHot())]


async def test_a_budget(mlxd: Command, house: House) -> None:
    code, out, _ = await mlxd("cache", "budget", "tiny", "4GiB")
    assert (code, "tiny: 4.3 GB, now" in out) == (0, True)
    assert house.caches.told == [("tiny", SetBudget(hot_cache_bytes=4 * 1024**3))]
    code, _, error = await mlxd("cache", "budget", "tiny", "much")
    assert (code, "expected a size" in error) == (1, True)
    code, _, error = await mlxd("cache", "budget", "nothing", "4GiB")
    assert (code, "No such model" in error) == (1, True)


async def test_keys_say_whose_cache_they_share(mlxd: Command, house: House) -> None:
    """Sharing is chosen at a key's making, and stated; nothing else makes two keys share."""
    assert (await mlxd("keys", "add", "ann"))[0] == 0
    assert (await mlxd("keys", "add", "team", "--share-cache-with", "ann", "--cache-ttl", "7d"))[0] == 0
    assert (await mlxd("keys", "add", "bob"))[0] == 0
    _, out, _ = await mlxd("keys", "list")
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert "team" in rows["ann"]
    assert "ann" in rows["team"]
    assert "7 d" in rows["team"]
    assert "ann" not in rows["bob"]
    for arguments in (("--share-cache-with", "nobody"), ("--cache-ttl", "soon")):
        code, _, error = await mlxd("keys", "add", "eve", *arguments)
        assert (code, error.count("\n")) == (1, 1)


async def test_the_bench_speaks_of_each_loaded_model(mlxd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement itself is the cachestore's; here a stand-in prints its answer."""
    answer = (
        '{"directory":"d","free_bytes":1,"page_cache":"kept","seconds":1.0,"written_bytes":1,"sizes":['
        '{"block_bytes":1048576,"files":1,"write_seconds":1,"cold_read_seconds":1,"warm_read_seconds":1,'
        '"write_bytes_per_second":1e9,"cold_read_bytes_per_second":2e9,"warm_read_bytes_per_second":3e9}]}'
    )
    monkeypatch.setattr("gateway.cache_cli.BENCH_COMMAND", ("/bin/sh", "-c", f"echo '{answer}'"))
    code, out, _ = await mlxd("cache", "bench")
    assert code == 0
    for words in ("1.0 MB", "2.0 GB/s", "may have kept these files in memory", "tiny: send it a prompt"):
        assert words in out
    monkeypatch.setattr("gateway.cache_cli.BENCH_COMMAND", ("/bin/sh", "-c", "echo 'no room: make some' >&2; exit 1"))
    assert await mlxd("cache", "bench") == (1, "", "mlxd: no room: make some\n")
