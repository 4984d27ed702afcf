"""Installing and removing, with a manager that answers as the test says: the calls in order, and every way out."""

import os
import plistlib
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.service_install import Hands, ManagerName, Ran, install, run_command, service_state, uninstall
from gateway.service_plan import ServiceAccount, ServicePlan, ServiceProblem

TARGET = "gui/501/studio.mlxd"


@dataclass
class Machine:
    """A launchctl or systemctl that answers with the codes it was given, in turn; the last of them for ever.

    A job is loaded by a good bootstrap and gone with a good bootout. `serves_for` seconds pass until one that was told
    to end has ended.
    """

    codes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    loaded: set[str] = field(default_factory=set[str])
    serving: bool = False
    serves_for: int = 0
    calls: list[str] = field(default_factory=list[str])
    slept: float = 0.0

    def run(self, command: Sequence[str], timeout_seconds: float) -> Ran:
        assert timeout_seconds > 0
        program, verb, *rest = [word for word in command if word != "--user"]
        self.calls.append(" ".join([verb, *rest]))
        key = f"{program} {verb}"
        codes = self.codes.get(key, [])
        code = (codes.pop(0) if len(codes) > 1 else codes[0]) if codes else self.code(verb, rest)
        if code == 0:
            self.happen(verb, rest)
        return Ran(code=code, output=f"{verb} says\nthis" if code else "\tstate = running\n")

    def code(self, verb: str, rest: list[str]) -> int:
        if verb == "print" and rest[0].count("/") == 2:
            return 0 if rest[0] in self.loaded else 113
        if verb == "is-active":
            return 0 if "mlxd.service" in self.loaded else 3
        return 0

    def happen(self, verb: str, rest: list[str]) -> None:
        match verb:
            case "bootstrap":
                self.loaded.add(f"{rest[0]}/studio.mlxd")
                self.serving = True
            case "bootout":
                self.loaded.discard(rest[0])
            case "restart":
                self.loaded.add("mlxd.service")
            case "disable":
                self.loaded.discard("mlxd.service")
            case "kill" if not self.serves_for:
                self.serving = False
            case _:
                pass

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        if self.serves_for and self.slept >= self.serves_for:
            self.serving = False


@dataclass
class Bench:
    """A home in a test's directory, and the hands that work on it."""

    machine: Machine
    plan: ServicePlan
    hands: Hands
    root: Path

    @property
    def file(self) -> Path:
        return self.root / "user" / "Library" / "LaunchAgents" / "studio.mlxd.plist"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    machine = Machine()
    plan = ServicePlan(
        scope="user",
        python="/opt/python",
        home=str(tmp_path / "home"),
        config=None,
        user_home=str(tmp_path / "user"),
        stop_seconds=180,
    )
    hands = Hands(
        run=machine.run,
        sleep=machine.sleep,
        is_serving=lambda: machine.serving,
        user_id=501,
        root=str(tmp_path / "root"),
    )
    return Bench(machine=machine, plan=plan, hands=hands, root=tmp_path)


def test_a_first_install(bench: Bench) -> None:
    """In the user's graphical domain, enabled before it is bootstrapped; the file is whole and readable, the folders
    that launchd opens are there before."""
    install("launchd", bench.plan, bench.hands)
    orders = [call for call in bench.machine.calls if not call.startswith("print")]
    assert orders == [f"enable {TARGET}", f"bootstrap gui/501 {bench.file}"]
    assert plistlib.loads(bench.file.read_bytes())["WorkingDirectory"] == bench.plan.home
    assert stat.S_IMODE(bench.file.stat().st_mode) == 0o644
    assert stat.S_IMODE(Path(bench.plan.home).stat().st_mode) == 0o700
    assert Path(bench.plan.logs_directory).is_dir()
    state = service_state("launchd", bench.plan, bench.hands)
    assert (state.installed, state.loaded, state.domain, state.details) == (True, True, "gui/501", ("state = running",))


def test_without_a_screen(bench: Bench) -> None:
    """Over SSH there is no gui domain: the user's own is taken."""
    bench.machine.codes["launchctl print"] = [113, 113, 125]
    install("launchd", bench.plan, bench.hands)
    assert f"bootstrap user/501 {bench.file}" in bench.machine.calls


def test_an_install_over_a_running_one(bench: Bench) -> None:
    """An upgrade: SIGTERM, wait for the drain, bootout, and only then the new job; nothing is ever killed."""
    install("launchd", bench.plan, bench.hands)
    bench.machine.calls.clear()
    bench.machine.serves_for = 42
    install("launchd", replace(bench.plan, stop_seconds=400), bench.hands)
    orders = [call for call in bench.machine.calls if not call.startswith("print")]
    assert orders == [
        f"kill SIGTERM {TARGET}",
        f"bootout {TARGET}",
        f"enable {TARGET}",
        f"bootstrap gui/501 {bench.file}",
    ]
    assert bench.machine.slept == 42
    assert plistlib.loads(bench.file.read_bytes())["ExitTimeOut"] == 400


@pytest.mark.parametrize("code", [5, 37, 119])
def test_launchd_is_busy(bench: Bench, code: int) -> None:
    """A label that still drains, an operation in progress, a disabled job: tried again until it works."""
    bench.machine.codes["launchctl bootstrap"] = [code, code, code, 0]
    install("launchd", bench.plan, bench.hands)
    assert sum(call.startswith("bootstrap") for call in bench.machine.calls) == 4
    assert sum(call.startswith("enable") for call in bench.machine.calls) == (4 if code == 119 else 1)
    assert 3 <= bench.machine.slept <= 20


@pytest.mark.parametrize(("code", "tries"), [(5, 20), (125, 1), (150, 1), (1, 1)])
def test_what_does_not_help_is_told(bench: Bench, code: int, tries: int) -> None:
    """After a bounded time, with launchctl's own words and where to look."""
    bench.machine.codes["launchctl bootstrap"] = [code]
    with pytest.raises(ServiceProblem, match=rf"ended with {code} \(bootstrap says this\); `log show"):
        install("launchd", bench.plan, bench.hands)
    assert sum(call.startswith("bootstrap") for call in bench.machine.calls) == tries


def test_a_service_that_runs_by_hand_is_not_disturbed(bench: Bench) -> None:
    """Two could not share a home: the second would be started and die for ever."""
    bench.machine.serving = True
    for manager in ("launchd", "systemd"):
        with pytest.raises(ServiceProblem, match="by hand"):
            install(manager, bench.plan, bench.hands)
    assert not bench.file.exists()


@pytest.mark.parametrize("code", [0, 3, 113, 37])
def test_uninstall(bench: Bench, code: int) -> None:
    """Stopped in peace, thrown out, its file gone, its home kept; what is gone already is no error; twice is fine."""
    install("launchd", bench.plan, bench.hands)
    bench.machine.calls.clear()
    bench.machine.codes["launchctl bootout"] = [code, 0]
    assert uninstall("launchd", bench.plan, bench.hands) == "removed"
    assert bench.machine.calls[1:3] == [f"kill SIGTERM {TARGET}", f"bootout {TARGET}"]
    assert not bench.file.exists()
    assert Path(bench.plan.home).is_dir()
    bench.machine.loaded.clear()
    assert uninstall("launchd", bench.plan, bench.hands) == "was_not_there"


def test_systemd(bench: Bench) -> None:
    """Install reloads, enables, and restarts until it serves; uninstall disables, removes, reloads."""
    hands = bench.hands
    install("systemd", bench.plan, hands)
    file = bench.root / "user" / ".config" / "systemd" / "user" / "mlxd.service"
    assert bench.machine.calls == ["daemon-reload", "enable mlxd.service", "restart mlxd.service"]
    assert hands.said[0] == "systemctl --user daemon-reload"
    assert "ExecStart=/opt/python" in file.read_text()
    assert service_state("systemd", bench.plan, hands).loaded
    bench.machine.calls.clear()
    assert uninstall("systemd", bench.plan, hands) == "removed"
    assert bench.machine.calls == ["disable --now mlxd.service", "daemon-reload"]
    assert not file.exists()
    assert uninstall("systemd", bench.plan, hands) == "was_not_there"
    bench.machine.codes["systemctl restart"] = [1]
    with pytest.raises(ServiceProblem, match="journalctl --user -u mlxd"):
        install("systemd", bench.plan, hands)


@pytest.mark.parametrize("manager", ["launchd", "systemd"])
def test_a_daemons_folders_are_its_accounts(bench: Bench, tmp_path: Path, manager: ManagerName) -> None:
    """What the service must write is made and given to it before it starts; a home of somebody else's is refused."""
    me = ServiceAccount(name="me", group="us", user_id=os.getuid(), group_id=os.getgid(), home="/nonexistent")
    plan = replace(bench.plan, scope="system", account=me)
    install(manager, plan, bench.hands)
    for name in ("", "logs", "run", "hf", "models"):
        assert stat.S_IMODE((Path(plan.home) / name).stat().st_mode) == 0o700
    assert len([path for path in (tmp_path / "root").rglob("*mlxd*") if path.is_file()]) == 1
    bench.machine.serving = False
    other = replace(plan, account=replace(me, user_id=me.user_id + 1))
    with pytest.raises(ServiceProblem, match=r"is not me's: run chown -R me"):
        install(manager, other, bench.hands)


def test_a_file_that_cannot_be_written_is_told(bench: Bench) -> None:
    """In one line, and nothing half-written stays."""
    bench.file.parent.parent.mkdir(parents=True)
    bench.file.parent.write_text("a file in the folder's place")
    with pytest.raises(ServiceProblem, match="cannot be written"):
        install("launchd", bench.plan, bench.hands)
    assert "bootstrap" not in " ".join(bench.machine.calls)


def test_a_command_that_is_not_there_or_never_ends() -> None:
    """A machine without the manager, and a manager that hangs, are one line each."""
    with pytest.raises(ServiceProblem, match="there is no launchctl-of-nobody here"):
        run_command(["launchctl-of-nobody", "print"], 1.0)
    with pytest.raises(ServiceProblem, match="did not end within"):
        run_command(["sleep", "60"], 0.05)
    assert run_command(["sh", "-c", "echo out; echo err >&2; exit 5"], 5.0) == Ran(code=5, output="out\nerr\n")
