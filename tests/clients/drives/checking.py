"""What every Python drive shares: where the service is, and one line of JSON for each check.

Runs in a client's own environment, which has no mlxd and perhaps no pytest.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ["MLXD_URL"]
KEY = os.environ["MLXD_KEY"]
MODEL = os.environ["MLXD_MODEL"]
EMBEDDER = os.environ["MLXD_EMBEDDER"]
PROOF = os.environ["MLXD_PROOF"]
"""What the tool gives; the model says SEEN only if it comes back."""
SEEN = os.environ["MLXD_SEEN"]
TALKED = os.environ["MLXD_TALKED"]

TALK = "ask:talk"
WEATHER = "ask:weather"
CITY = "Oslo"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"4 degrees in {city}: {PROOF}" if city == CITY else "unknown city"


def run(checks: dict[str, Callable[[], None]]) -> None:
    """Run each check; a check that raises has failed, and the others go on."""
    for name, check in checks.items():
        try:
            check()
            verdict, detail = "pass", ""
        except Exception as why:  # noqa: BLE001  (a verdict of whatever went wrong)
            traceback.print_exc(file=sys.stderr)
            verdict, detail = "fail", f"{type(why).__name__}: {why}"[:300]
        print(json.dumps({"check": name, "verdict": verdict, "detail": detail}), flush=True)  # noqa: T201
