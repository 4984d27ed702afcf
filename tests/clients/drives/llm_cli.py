"""The `llm` command, set up as its documentation says for servers like OpenAI's: a file of models, one of keys."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import KEY, MODEL, SEEN, TALK, TALKED, URL, WEATHER, run

home = Path(tempfile.mkdtemp(prefix="llm"))
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: mlxd\n  supports_tools: true\n"
)
(home / "keys.json").write_text(json.dumps({"mlxd": KEY}))
ENVIRONMENT = {**os.environ, "LLM_USER_PATH": str(home)}
FUNCTION = "def get_weather(city: str) -> str:\n    return __import__('os').environ['MLXD_PROOF']\n"


def ask(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), "-m", "local", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def text() -> None:
    assert ask("--no-stream", TALK).strip() == TALKED


def stream() -> None:
    assert ask(TALK).strip() == TALKED


def tool_round_trip() -> None:
    assert SEEN in ask("--functions", FUNCTION, WEATHER)


run({"text": text, "stream": stream, "tool round trip": tool_round_trip})
