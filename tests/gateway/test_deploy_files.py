"""The files in deploy/ are what `mlxd service print` says for these three installations."""

from pathlib import Path

import pytest

from gateway.service_launchd import job_file
from gateway.service_plan import ServiceAccount, ServicePlan, stop_seconds
from gateway.service_systemd import unit

DEPLOY = Path(__file__).parents[2] / "deploy"
PYTHON = "/opt/mlxd/current/bin/python"
DEFAULT_DRAIN_SECONDS = 30.0


def users(home: str) -> ServicePlan:
    return ServicePlan(
        scope="user",
        python=PYTHON,
        home=f"{home}/.mlxd",
        config=None,
        user_home=home,
        stop_seconds=stop_seconds(DEFAULT_DRAIN_SECONDS),
    )


SHARED = ServicePlan(
    scope="system",
    python=PYTHON,
    home="/var/mlxd",
    config=None,
    user_home="/var/mlxd",
    stop_seconds=stop_seconds(DEFAULT_DRAIN_SECONDS),
    account=ServiceAccount(name="_mlxd", group="_mlxd", user_id=450, group_id=450, home="/var/mlxd"),
)

FILES = {
    "studio.mlxd.agent.plist": job_file(users("/Users/ada")),
    "studio.mlxd.daemon.plist": job_file(SHARED),
    "mlxd.service": unit(users("/home/ada")).encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_what_is_installed(name: str) -> None:
    """An example that differs from what the command writes would teach the wrong thing."""
    assert (DEPLOY / name).read_bytes() == FILES[name]
