"""The two SDKs that the suite installs anyway are driven by `make test`, too; the others by `make clients`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.driving import EMBEDDER, MODEL, drive
from tests.clients.table import Check, Client
from tests.fakes.client_model import make_client_model
from tests.fakes.live_service import LiveService, live_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Iterator[LiveService]:
    """The model for clients, an embedding model, and a key."""
    script = make_client_model(tmp_path_factory.mktemp("models") / "script")
    with live_service({MODEL: script, EMBEDDER: minilm}) as live:
        live.add_key("clients")
        yield live


@pytest.mark.parametrize("script", ["openai_sdk.py", "anthropic_sdk.py"])
def test_the_sdk_does_everything_that_its_drive_asks(service: LiveService, script: str) -> None:
    """Text, streams, a tool's round trip and errors, through the SDK's own code over a socket."""
    client = Client(name="sdk", registry="pypi", packages=("sdk==0",), drive=(script,))
    checks = drive(client, Path(sys.prefix), service, service.keys["clients"])
    assert checks == tuple(Check(check=check.check, verdict="pass") for check in checks)
    assert len(checks) >= 6
