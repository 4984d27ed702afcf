"""How each agent is started against this server: its program, its arguments, its environment, its own files. Pure.

An agent's own configuration is never edited: what it is told is told for one run. A key stands in no argument, for
every process of the machine may read those; an agent finds it in its environment, or in a file that is its owner's.
What each reads is said by its own documentation or its `--help`, of the version that tests/clients pins.
"""

from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

KEY_VARIABLE = "MLXD_KEY"
NO_KEY = "none"
"""What is sent where no key is needed: most clients refuse to start with an empty one."""


class Server(Struct, frozen=True, kw_only=True):
    """What a client is to use. `url` has no path; `context_tokens` None is unknown."""

    url: str
    model: str
    context_tokens: int | None = None


class PrivateFile(Struct, frozen=True, kw_only=True):
    """A file that the agent reads, of mode 0600, below a directory of the agent's that mlxd owns.

    It is JSON if `holds_key`, and then every KEY in it is replaced by the key.
    """

    name: str
    text: str
    holds_key: bool = False


class Setup(Struct, frozen=True, kw_only=True):
    """One agent's start. `arguments` come before those of the caller.

    In the environment's values and in files that say so, KEY stands for the key; in arguments and values, FILES stands
    for the directory of `files`.
    """

    program: str
    install: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    files: tuple[PrivateFile, ...] = ()


KEY = "{mlxd-key}"
FILES = "{mlxd-files}"


def _claude(server: Server) -> Setup:
    """https://code.claude.com/docs/en/env-vars and …/llm-gateway. Each of its model names is this model: what it does
    in the background asks for a small one that nobody has here."""
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    return Setup(
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        environment={
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            **dict.fromkeys((*names, "CLAUDE_CODE_SUBAGENT_MODEL"), server.model),
            # a line in the system prompt that changes with every request, so that no prefix would be found again
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": "3000000",
        },
    )


def _codex(server: Server) -> Setup:
    """https://developers.openai.com/codex/config-reference. A provider of its own, by overrides for one run."""
    provider = {
        "name": "mlxd",
        "base_url": f"{server.url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
    }
    overrides = {
        "model": server.model,
        "model_provider": "mlxd",
        **{f"model_providers.mlxd.{field}": value for field, value in provider.items()},
        "web_search": "disabled",  # a tool that OpenAI's servers run
    }
    files = (PrivateFile(name="models.json", text=_json({"models": [_codex_model(server)]})),)
    overrides["model_catalog_json"] = f"{FILES}/models.json"
    pairs = [f"{name}={_json(value)}" for name, value in overrides.items()]
    return Setup(
        program="codex",
        install="npm install -g @openai/codex",
        arguments=tuple(argument for pair in pairs for argument in ("-c", pair)),
        environment={KEY_VARIABLE: KEY},
        files=files,
    )


def _codex_model(server: Server) -> dict[str, object]:
    """An entry of Codex's model catalog, as `codex debug models` prints it. Without one it guesses the model's window
    and says with every start that it does."""
    return {
        "slug": server.model,
        "display_name": server.model,
        "description": "Served by mlxd",
        "supported_reasoning_levels": [],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": server.context_tokens or _CONTEXT_TOKENS_GUESSED,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }


_CODEX_INSTRUCTIONS = """\
You are a coding agent in the user's terminal, in the folder that the user works in.

- Look before you change: read the files and run the commands that tell you how things are. Do not guess.
- Do what was asked, completely, and nothing else. Go on until it is done or you cannot go on without an answer.
- Keep to the style of the code around. Prefer the smallest change that mends the cause.
- Search with `rg` where there is one. Read long files in parts. Write files through the shell.
- Run the tests or the program that show whether your change works, and say so if you could not.
- Undo nothing that you did not do. Commit only if you are asked to. Delete nothing without being asked.
- At the end say in a few sentences what you changed, where, and what you found.
"""
_CONTEXT_TOKENS_GUESSED = 32_768


def _opencode(server: Server) -> Setup:
    """https://opencode.ai/docs/config and …/providers. The same model makes titles, so that no other is asked for."""
    limit = {} if server.context_tokens is None else {"limit": {"context": server.context_tokens, "output": 32_768}}
    config = {
        "provider": {
            "mlxd": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "mlxd",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {server.model: {"name": server.model, "tool_call": True, **limit}},
            }
        },
        "model": f"mlxd/{server.model}",
        "small_model": f"mlxd/{server.model}",
        "share": "disabled",
        "autoupdate": False,
    }
    return Setup(
        program="opencode",
        install="npm install -g opencode-ai",
        environment={
            "OPENCODE_CONFIG_CONTENT": _json(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            KEY_VARIABLE: KEY,
        },
    )


def _aider(server: Server) -> Setup:
    """https://aider.chat/docs/llms/openai-compat.html, …/config/options.html and …/config/adv-model-settings.html.

    Of a model that it is told nothing of it looks for a price in the internet."""
    name = f"openai/{server.model}"
    window = server.context_tokens or _CONTEXT_TOKENS_GUESSED
    metadata = {
        name: {
            "litellm_provider": "openai",
            "mode": "chat",
            "max_input_tokens": window,
            "max_tokens": window,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        }
    }
    return Setup(
        program="aider",
        install="pip install aider-chat",
        arguments=("--model", name, "--model-metadata-file", f"{FILES}/metadata.json"),
        environment={
            "OPENAI_API_BASE": f"{server.url}/v1",
            "OPENAI_API_KEY": KEY,
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files=(PrivateFile(name="metadata.json", text=_json(metadata)),),
    )


def _qwen(server: Server) -> Setup:
    """https://qwenlm.github.io/qwen-code-docs/en/cli/openai-auth."""
    return Setup(
        program="qwen",
        install="npm install -g @qwen-code/qwen-code",
        arguments=("--auth-type", "openai"),
        environment={"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": server.model},
    )


def _cline(server: Server) -> Setup:
    """As `cline auth --data-dir` leaves it; it takes a key from an argument or from this file only."""
    provider = "openai-compatible"
    settings = {"provider": provider, "apiKey": KEY, "model": server.model, "baseUrl": f"{server.url}/v1"}
    providers = {
        "version": 1,
        "lastUsedProvider": provider,
        "modes": {},
        "providers": {
            provider: {"settings": settings, "updatedAt": "1970-01-01T00:00:00.000Z", "tokenSource": "manual"}
        },
    }
    return Setup(
        program="cline",
        install="npm install -g cline",
        arguments=("--data-dir", FILES, "--provider", provider, "--model", server.model),
        files=(PrivateFile(name="settings/providers.json", text=_json(providers), holds_key=True),),
    )


def _pi(server: Server) -> Setup:
    """Its docs/custom-provider.md: an extension for one run; `apiKey` names a variable."""
    model = {
        "id": server.model,
        "name": server.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": server.context_tokens or _CONTEXT_TOKENS_GUESSED,
        "maxTokens": 16_384,
    }
    provider = {
        "baseUrl": f"{server.url}/v1",
        "apiKey": KEY_VARIABLE,
        "api": "openai-completions",
        "models": [model],
    }
    return Setup(
        program="pi",
        install="npm install -g @mariozechner/pi-coding-agent",
        arguments=("--extension", f"{FILES}/mlxd.js", "--provider", "mlxd", "--model", server.model),
        environment={"PI_OFFLINE": "1", KEY_VARIABLE: KEY},
        files=(
            PrivateFile(
                name="mlxd.js",
                text=f'export default function (pi) {{\n  pi.registerProvider("mlxd", {_json(provider)});\n}}\n',
            ),
        ),
    )


def _cn(server: Server) -> Setup:
    """Continue's agent for terminals: https://docs.continue.dev/reference; a secret is a variable, and JSON is YAML."""
    model = {
        "name": server.model,
        "provider": "openai",
        "model": server.model,
        "apiBase": f"{server.url}/v1",
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "defaultCompletionOptions": {"contextLength": server.context_tokens or _CONTEXT_TOKENS_GUESSED},
    }
    config = {"name": "mlxd", "version": "1.0.0", "schema": "v1", "models": [model]}
    return Setup(
        program="cn",
        install="npm install -g @continuedev/cli",
        arguments=("--config", f"{FILES}/config.yaml"),
        environment={"CONTINUE_TELEMETRY_ENABLED": "0", KEY_VARIABLE: KEY},
        files=(PrivateFile(name="config.yaml", text=_json(config)),),
    )


AGENTS: Mapping[str, Callable[[Server], Setup]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "aider": _aider,
    "qwen": _qwen,
    "cline": _cline,
    "pi": _pi,
    "cn": _cn,
}


def with_key(text: str, key: str) -> str:
    """A value as the agent gets it."""
    return text.replace(KEY, key)


def file_text(file: PrivateFile, key: str) -> str:
    """A file's text. A key is put into JSON as JSON writes it."""
    return file.text.replace(_json(KEY), _json(key)) if file.holds_key else file.text


def with_files(text: str, directory: str) -> str:
    """An argument or a value, with the directory of the agent's files."""
    return text.replace(FILES, directory)


def _json(value: object) -> str:
    """Also TOML's way to write texts, numbers and lists."""
    return msgspec.json.encode(value).decode()
