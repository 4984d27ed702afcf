"""mlxd as a unit of systemd: what it says, that systemd understands it, and that no path can be misread."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.service_plan import ServiceAccount, ServicePlan, ServiceProblem, check_plan, remarks
from gateway.service_systemd import systemctl, unit, unit_path

PLAN = ServicePlan(
    scope="user",
    python="/opt/mlxd/current/bin/python",
    home="/home/ada/.mlxd",
    config=None,
    user_home="/home/ada",
    stop_seconds=180,
)
ACCOUNT = ServiceAccount(name="mlxd", group="mlxd", user_id=990, group_id=990, home="/nonexistent")
SYSTEM = replace(PLAN, scope="system", home="/var/lib/mlxd", account=ACCOUNT)


def settings_of(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "["))]
    return dict(line.split("=", 1) for line in lines)


def test_the_drain_can_finish() -> None:
    """SIGTERM reaches the gateway alone, and SIGKILL comes after the time that it may need; private files; it comes
    back after a crash, and a worker killed for want of memory takes nothing down."""
    told = settings_of(unit(PLAN))
    assert (told["KillMode"], told["TimeoutStopSec"], told["UMask"]) == ("mixed", "180", "0077")
    assert (told["Type"], told["Restart"], told["OOMPolicy"]) == ("notify", "on-failure", "continue")
    assert "KillSignal" not in told
    assert told["WantedBy"] == "default.target"


def test_user_and_system() -> None:
    """The system's names its account and starts at boot; each has its own place and its own systemctl."""
    told = settings_of(unit(SYSTEM))
    assert (told["User"], told["Group"], told["WantedBy"]) == ("mlxd", "mlxd", "multi-user.target")
    assert "User" not in settings_of(unit(PLAN))
    assert str(unit_path(PLAN)) == "/home/ada/.config/systemd/user/mlxd.service"
    assert str(unit_path(PLAN, config_home="/x")) == "/x/systemd/user/mlxd.service"
    assert str(unit_path(SYSTEM)) == "/etc/systemd/system/mlxd.service"
    assert systemctl("restart", PLAN) == ("systemctl", "--user", "restart", "mlxd.service")
    assert systemctl("disable", SYSTEM) == ("systemctl", "disable", "--now", "mlxd.service")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("plan", [PLAN, SYSTEM], ids=["user", "system"])
def test_systemd_understands_it(plan: ServicePlan, runtime_directory: Path) -> None:
    """`systemd-analyze verify` has no complaint, also about a home with a space, a percent sign, a dollar, quotes."""
    odd = replace(plan, python=sys.executable, home=f"{runtime_directory}/my %h $HOME \"q\" 'p' \\n",
                  account=plan.account and replace(plan.account, name="daemon", group="daemon"))  # fmt: skip
    file = runtime_directory / "mlxd.service"
    file.write_text(unit(odd))
    mode = ["--user"] if plan.scope == "user" else []
    verified = subprocess.run(
        ["systemd-analyze", *mode, "verify", "--man=no", str(file)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    about_it = [line for line in verified.stderr.splitlines() if "mlxd.service" in line]
    assert (verified.returncode, about_it) == (0, []), verified.stderr


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1).map(lambda text: f"/{text}"))
def test_a_path_stays_one_argument(home: str) -> None:
    """Whatever a home is called: split and unescaped as systemd does it, the command is what it was."""
    plan = replace(PLAN, home=home)
    line = settings_of(unit(plan))["ExecStart"]
    words = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(line)]
    assert tuple(words) == plan.program


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"home": "/srv/a\nb"}, "printable"),
        ({"home": "mlxd"}, "absolute"),
        ({"python": "python"}, "absolute"),
        ({"config": "mlxd.toml"}, "absolute"),
        ({"home": "/srv/mlxd "}, "ends in"),
        ({"home": "/srv/mlxd\\"}, "ends in"),
        ({"scope": "system"}, "--user"),
        ({"scope": "system", "account": replace(ACCOUNT, name="root", user_id=0)}, "does not run as root"),
    ],
)
def test_what_no_manager_could_run_is_refused(changes: dict[str, object], words: str) -> None:
    """Before anything is written."""
    with pytest.raises(ServiceProblem, match=words):
        check_plan(replace(PLAN, **changes))
    check_plan(PLAN)
    check_plan(SYSTEM)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"home": "/home/ada/Documents/mlxd"}, 1),
        ({"home": "/home/ada/Documentsmlxd"}, 0),
        ({"home": "/Volumes/models", "python": "/home/ada/Desktop/python"}, 2),
    ],
)
def test_places_that_macos_guards_are_remarked(changes: dict[str, object], count: int) -> None:
    """A service that may not read its own home shows no sign of why."""
    assert len(remarks(replace(PLAN, **changes))) == count
