"""What the process does to itself at its start: where its log goes, and how many files it may open."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TALKATIVE = """
import sys
from pathlib import Path
import structlog
from gateway import logs
logs._FILE_BYTES = 2000
logs.configure_logging("info", file=Path(sys.argv[1]))
for number in range(200):
    structlog.get_logger().info("said", number=number, text="100 % sure, {curly}\\nand two lines")
    structlog.stdlib.get_logger("mlxd.access").debug("whispered")
"""

LIMITED = """
import json, resource
from gateway.file_limit import raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
raise_file_limit()
print(json.dumps([*resource.getrlimit(resource.RLIMIT_NOFILE), hard]))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )


def test_a_log_file_is_private_bounded_and_rotated(tmp_path: Path) -> None:
    """One event is one line, the newest in the file itself, the oldest gone; nothing of it is on standard error."""
    log = tmp_path / "mlxd.log"
    assert run(TALKATIVE, str(log)).stderr == ""
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["mlxd.log", *(f"mlxd.log.{number}" for number in range(1, 5))]
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.stat().st_size <= 2000
        for line in file.read_text().splitlines():
            assert "level=info event=said" in line
            assert r"100 % sure, {curly}\nand two lines" in line
    assert "number=199 " in log.read_text().splitlines()[-1]


@pytest.mark.parametrize("place", ["a directory that is not there", "a directory"])
def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path, place: str) -> None:
    """In one line that names the option."""
    log = tmp_path / "none" / "mlxd.log" if "not there" in place else tmp_path
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "gateway", "serve", "--home", str(tmp_path / "home"), "--log-file", str(log)],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("mlxd: --log-file: ")


def test_the_limit_of_open_files_is_lifted() -> None:
    """As far as this system allows; the hard limit is not touched."""
    soft, hard, hard_before = json.loads(run(LIMITED).stdout)
    assert hard == hard_before
    assert soft in (65536, 10240, hard)
