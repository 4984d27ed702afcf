"""What to set in a client by hand, as text for `mlxd connect`. Pure.

Of the agents that `mlxd launch` starts, it is what launching would set. No text holds a key: each says MLXD_KEY.
"""

import shlex
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from gateway.client_setups import AGENTS, FILES, KEY, KEY_VARIABLE, PrivateFile, Server, Setup

_KEY_HERE = f"${{{KEY_VARIABLE}}}"


def guide(name: str, server: Server) -> str:
    """The text. `name` is one of GUIDES."""
    return GUIDES[name](server)


def _launched(name: str, server: Server) -> str:
    setup = AGENTS[name](server)
    lines = [f"# mlxd launch {name} does all of this for one run.", f"# {setup.program}: {setup.install}"]
    told = {name: value for name, value in setup.environment.items() if name != KEY_VARIABLE}
    if KEY_VARIABLE in setup.environment:
        lines.append(f"# It reads {KEY_VARIABLE} itself: export that.")
    lines += [f"export {variable}={_shell(value)}" for variable, value in told.items()]
    for file in setup.files:
        lines += _heredoc(name, file)
    lines.append(_command(name, setup))
    return "\n".join(lines)


def _shell(value: str) -> str:
    """A value in a shell's words; the key stays a variable, which no single quotes may hold."""
    return f'"{_KEY_HERE}"' if value == KEY else shlex.quote(value)


def _heredoc(name: str, file: PrivateFile) -> list[str]:
    path = f"~/.mlxd/agents/{name}/{file.name}"
    folder = path.rpartition("/")[0]
    # An unquoted end word lets the shell put the key in; what it would read otherwise is escaped.
    text = file.text.replace("\\", "\\\\").replace("$", "\\$").replace("`", "\\`").replace(KEY, _KEY_HERE)
    return [f"mkdir -p {folder}", f"(umask 077; cat > {path} <<END\n{text.rstrip()}\nEND\n)"]


def _command(name: str, setup: Setup) -> str:
    words = [setup.program, *setup.arguments]
    return " ".join(shlex.quote(word) if FILES not in word else _in_home(name, word) for word in words)


def _in_home(name: str, word: str) -> str:
    """In double quotes, inside of which a tilde would stay one."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return f'"{text.replace(FILES, f"$HOME/.mlxd/agents/{name}")}"'


def _openai_sdk(server: Server) -> str:
    return f"""\
export OPENAI_BASE_URL={server.url}/v1
export OPENAI_API_KEY="{_KEY_HERE}"
# Python: OpenAI().chat.completions.create(model={msgspec.json.encode(server.model).decode()}, messages=[…])"""


def _anthropic_sdk(server: Server) -> str:
    return f"""\
export ANTHROPIC_BASE_URL={server.url}
export ANTHROPIC_API_KEY="{_KEY_HERE}"
# Python: Anthropic().messages.create(model={msgspec.json.encode(server.model).decode()}, max_tokens=1000, messages=[…])
# The URL has no /v1: the SDK adds it."""


def _curl(server: Server) -> str:
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    return f"""\
curl {server.url}/v1/chat/completions \\
  -H "Authorization: Bearer {_KEY_HERE}" -H 'Content-Type: application/json' \\
  -d {shlex.quote(msgspec.json.encode(body).decode())}"""


def _continue(server: Server) -> str:
    """https://docs.continue.dev/reference: config.yaml."""
    model = msgspec.json.encode(server.model).decode()
    return f"""\
# ~/.continue/config.yaml; the key goes into ~/.continue/.env as {KEY_VARIABLE}=…
name: mlxd
version: 1.0.0
schema: v1
models:
  - name: {model}
    provider: openai
    model: {model}
    apiBase: {server.url}/v1
    apiKey: ${{{{ secrets.{KEY_VARIABLE} }}}}
    roles: [chat, edit, apply]
# Autocompletion asks /v1/completions with a suffix: give the role autocomplete to a model that fills in code."""


def _zed(server: Server) -> str:
    """https://zed.dev/docs/ai/llm-providers: OpenAI-compatible API."""
    tokens = 32_768 if server.context_tokens is None else server.context_tokens
    capabilities = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": True}
    model = {"name": server.model, "max_tokens": tokens, "capabilities": capabilities}
    provider = {"api_url": f"{server.url}/v1", "available_models": [model]}
    settings = {"language_models": {"openai_compatible": {"mlxd": provider}}}
    text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
    return f"// settings.json. Zed asks for the key in its panel, or takes it from the variable MLXD_API_KEY.\n{text}"


def _xcode(server: Server) -> str:
    """Its settings know a port on this machine, or a URL with a header for the key."""
    return f"""\
Xcode, Settings, Intelligence, Add a Model Provider:
  on this Mac: "Locally Hosted", and the port of {server.url}; no key is needed unless one was made
  elsewhere:   "Internet Hosted", URL {server.url}, API key header: Authorization, API key: Bearer {_KEY_HERE}
It lists the models by itself, from /v1/models."""


def _cursor(server: Server) -> str:
    return f"""\
Cursor cannot use {server.url}. It sends what you type to its own servers first, and those call the model, also with a
key and URL of your own: an address of this network is out of their reach, and they refuse plain HTTP. It would take a
public HTTPS address for this server, which mlxd does not make. Editors that call the server themselves: zed, continue,
cline; agents in a terminal: {", ".join(AGENTS)}."""


GUIDES: Mapping[str, Callable[[Server], str]] = {
    **{name: partial(_launched, name) for name in AGENTS},
    "continue": _continue,
    "zed": _zed,
    "xcode": _xcode,
    "cursor": _cursor,
    "openai-sdk": _openai_sdk,
    "anthropic-sdk": _anthropic_sdk,
    "curl": _curl,
}
