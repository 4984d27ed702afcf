"""mlxd as a job of launchd: key by key, as launchd.plist(5) has them, and what launchctl's codes mean."""

import plistlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.service_launchd import Action, Verdict, domains, job, job_file, job_path, launchctl, telling_lines, verdict
from gateway.service_plan import LABEL, ServiceAccount, ServicePlan, stop_seconds

AGENT = ServicePlan(
    scope="user",
    python="/opt/mlxd/current/bin/python",
    home="/Users/ada/.mlxd",
    config=None,
    user_home="/Users/ada",
    stop_seconds=180,
)
DAEMON = ServicePlan(
    scope="system",
    python="/opt/mlxd/current/bin/python",
    home="/var/mlxd",
    config="/etc/mlxd.toml",
    user_home="/var/mlxd",
    stop_seconds=180,
    account=ServiceAccount(name="_mlxd", group="_mlxd", user_id=250, group_id=250, home="/var/empty"),
)

TYPES: dict[str, type | tuple[type, ...]] = {
    "Label": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "KeepAlive": (bool, dict),
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "Umask": int,
    "WorkingDirectory": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "EnvironmentVariables": dict,
    "UserName": str,
    "GroupName": str,
    "LimitLoadToSessionType": list,
    "SoftResourceLimits": dict,
}
"""Every key that we use, with the type that the manual gives it."""


@pytest.mark.parametrize("plan", [AGENT, DAEMON], ids=["agent", "daemon"])
def test_every_key_has_the_manuals_type(plan: ServicePlan) -> None:
    """After a round trip through the file; a boolean is never an integer, nor the other way round."""
    read = plistlib.loads(job_file(plan))
    assert read == job(plan)
    for key, value in read.items():
        assert isinstance(value, TYPES[key]), key
        assert isinstance(value, bool) == (TYPES[key] is bool), key
    assert all(isinstance(word, str) for word in read["ProgramArguments"])
    assert all(isinstance(value, str) for value in read["EnvironmentVariables"].values())
    assert all(type(value) is int for value in read.get("SoftResourceLimits", {}).values())
    assert read["KeepAlive"] == {"SuccessfulExit": False}


@pytest.mark.parametrize("plan", [AGENT, DAEMON], ids=["agent", "daemon"])
def test_what_would_hurt_is_not_there(plan: ServicePlan) -> None:
    """No short time to stop, no throttling, no new session, no children that outlive the job, no shell, no secret."""
    read = job(plan)
    assert read["ExitTimeOut"] == 180
    assert read["ProcessType"] == "Interactive"
    assert read["Umask"] == 0o077
    assert read["RunAtLoad"] is True
    for key in ("SessionCreate", "AbandonProcessGroup", "Crashed", "HardResourceLimits", "EnablePressuredExit", "Nice"):
        assert key not in read
    program = read["ProgramArguments"]
    assert isinstance(program, list)
    assert program[0].startswith("/")
    assert program[1:5] == ["-P", "-m", "gateway", "serve"]
    environment = read["EnvironmentVariables"]
    assert isinstance(environment, dict)
    assert set(environment) <= {
        "HOME",
        "PATH",
        "LANG",
        "PYTHONUNBUFFERED",
        "AGX_RELAX_CDM_CTXSTORE_TIMEOUT",
        "TMPDIR",
        "HF_HOME",
    }
    assert {"HOME", "PATH", "LANG"} <= set(environment)
    assert environment["PATH"].startswith("/opt/mlxd/current/bin:")
    for key in ("StandardOutPath", "StandardErrorPath"):
        assert str(read[key]).startswith(f"{plan.home}/logs/")


def test_agent_and_daemon_differ_where_they_must() -> None:
    """An agent's account is its user's, and it runs with or without a screen; a daemon names its account, and leaves
    the machine's limits alone."""
    agent, daemon = job(AGENT), job(DAEMON)
    assert "UserName" not in agent
    assert agent["LimitLoadToSessionType"] == ["Aqua", "Background"]
    assert (daemon["UserName"], daemon["GroupName"]) == ("_mlxd", "_mlxd")
    assert "SoftResourceLimits" not in daemon
    assert "LimitLoadToSessionType" not in daemon
    assert "--config" in DAEMON.program
    assert str(job_path(AGENT)) == f"/Users/ada/Library/LaunchAgents/{LABEL}.plist"
    assert str(job_path(DAEMON)) == f"/Library/LaunchDaemons/{LABEL}.plist"
    assert domains(AGENT, user_id=501) == ("gui/501", "user/501")
    assert domains(DAEMON, user_id=0) == ("system",)


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("print-domain", ("print", "gui/501")),
        ("print", ("print", f"gui/501/{LABEL}")),
        ("enable", ("enable", f"gui/501/{LABEL}")),
        ("bootstrap", ("bootstrap", "gui/501", "/p.plist")),
        ("bootout", ("bootout", f"gui/501/{LABEL}")),
        ("terminate", ("kill", "SIGTERM", f"gui/501/{LABEL}")),
    ],
)
def test_the_calls(action: Action, arguments: tuple[str, ...]) -> None:
    """None of them is `load`, `unload` or `kickstart -k`: the first two fail on new systems, the last one kills."""
    assert launchctl(action, "gui/501", path="/p.plist") == ("launchctl", *arguments)


@pytest.mark.parametrize(
    ("action", "code", "means"),
    [
        ("bootstrap", 0, "done"),
        ("bootstrap", 5, "again"),
        ("bootstrap", 37, "again"),
        ("bootstrap", 119, "enable_first"),
        ("bootstrap", 125, "no_domain"),
        ("bootstrap", 150, "refused"),
        ("bootstrap", 1, "failed"),
        ("bootout", 0, "done"),
        ("bootout", 3, "not_loaded"),
        ("bootout", 113, "not_loaded"),
        ("bootout", 5, "again"),
        ("bootout", 37, "again"),
        ("terminate", 3, "not_loaded"),
        ("terminate", 5, "failed"),
        ("print", 113, "not_loaded"),
        ("print", 0, "done"),
    ],
)
def test_the_codes(action: Action, code: int, means: Verdict) -> None:
    """As they were reported from real machines."""
    assert verdict(action, code) == means


@given(st.sampled_from([0.0, 0.4, 30.0, 600.0]))
def test_launchd_waits_longer_than_the_service_takes(drain_seconds: float) -> None:
    """120 seconds or more in any case, and always more than the drain with the ladder behind it."""
    assert stop_seconds(drain_seconds) >= max(120, drain_seconds + 100)


PRINTED = """gui/501/studio.mlxd = {
\tactive count = 1
\tpath = /Users/ada/Library/LaunchAgents/studio.mlxd.plist
\tstate = running
\tprogram = /opt/mlxd
\tenvironment = {
\t\tstate = secret
\t}
\truns = 3
\tpid = 4711
\texit timeout = 180
\tlast exit code = 1
\tspawn type = interactive (4)
}
"""


def test_what_a_person_wants_of_launchctls_print() -> None:
    """The lines that tell something, from the top level only."""
    assert telling_lines(PRINTED) == (
        "state = running",
        "runs = 3",
        "pid = 4711",
        "exit timeout = 180",
        "last exit code = 1",
        "spawn type = interactive (4)",
    )
    assert telling_lines("Could not find service") == ()
