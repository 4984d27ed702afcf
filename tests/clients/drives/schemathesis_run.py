"""schemathesis: thousands of requests, right and wrong, made of /openapi.json; each answer must be a documented one."""

import os
import subprocess
import sys
from pathlib import Path

from checking import URL, run

_CONFIG = 'headers = { Authorization = "Bearer ${MLXD_KEY}" }\n'
_OPTIONS = (
    "--phases=examples,coverage,fuzzing",
    "--max-examples=6",
    "--generation-deterministic",
    # what a schema cannot say, such as that a tool must exist, is a 400 with words
    "--exclude-checks=positive_data_acceptance",
    "--suppress-health-check=all",
    "--continue-on-failure",
    "--request-timeout=30",
    "--no-color",
)


def openapi() -> None:
    Path("schemathesis.toml").write_text(_CONFIG)  # a key in an argument is seen by every process
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
    }
    command = [str(Path(sys.executable).parent / "st"), "run", f"{URL}/openapi.json", *_OPTIONS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)  # noqa: T201
    assert done.returncode == 0, f"ended with {done.returncode}"
    assert "Tested: " in done.stdout


run({"openapi": openapi})
