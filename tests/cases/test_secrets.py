"""Field case S02 where clients write more than a prompt: tools, schemas, grammars, histories, on every route.

The client's own error may quote what it sent. Logs, status, arguments of processes and file names may not, whatever
goes wrong: a refusal, a compiler's complaint, a worker's death.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.dialect_calls import PATHS, Dialect, request_body
from tests.fakes.http_answers import assert_serves
from tests.fakes.live_service import LiveService

MARK = "zqxsecretzqx"
EMBEDDER = "embedder"


def function_tool(**parameters: Any) -> dict[str, Any]:
    function = {"name": f"f_{MARK}", "description": f"{MARK} does", "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": f"s_{MARK}", "schema": schema}}


GOOD_SCHEMA = {"type": "object", "properties": {MARK: {"enum": [MARK, 1]}}, "required": [MARK]}
BAD_SCHEMAS: tuple[Any, ...] = (
    {"type": MARK},
    {"type": "object", "properties": {MARK: {"type": MARK}}},
    {"$ref": f"#/definitions/{MARK}"},
    {"type": "string", "pattern": f"({MARK}"},
    {"type": "string", "pattern": f"(?={MARK})"},
    {"type": "string", "format": MARK},
    {"type": "integer", "minimum": 5, "maximum": 1, "title": MARK},
    {"not": {"const": MARK}},
    {"allOf": [{"const": MARK}, {"const": f"{MARK}2"}]},
    {"type": "string", "minLength": 10**9, "description": MARK},
)
BAD_GRAMMARS = (
    f"start: {MARK}",
    f'start: "{MARK}',
    f'root ::= "{MARK}" |',
    f"%%{MARK}",
    f"start: /({MARK}/",
    MARK * 9000,
)


def chats() -> list[dict[str, Any]]:
    """Bodies of the chat route, good ones and bad ones."""
    formats = [schema_format(schema) for schema in (GOOD_SCHEMA, *BAD_SCHEMAS)]
    grammars = [{field: grammar} for grammar in BAD_GRAMMARS for field in ("guided_grammar", "grammar")]
    extras: list[dict[str, Any]] = [
        *({"response_format": each} for each in formats),
        *grammars,
        {"guided_regex": f"({MARK}"},
        {"guided_regex": f"{MARK}|x"},
        {"guided_choice": [MARK, MARK * 2]},
        {"guided_json": f'{{"type": "{MARK}'},
        {"tools": [function_tool(properties={MARK: {"type": "string"}})], "tool_choice": "required"},
        *({"tools": [function_tool(properties={"a": schema})], "tool_choice": "required"} for schema in BAD_SCHEMAS),
        {"tools": [function_tool()], "tool_choice": {"type": "function", "function": {"name": MARK}}},
        {"messages": [_calling(f'{{"{MARK}": '), {"role": "tool", "tool_call_id": MARK, "content": MARK}]},
        {"messages": [_calling(f'{{"{MARK}": 1}}'), {"role": "tool", "tool_call_id": MARK, "content": MARK}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": MARK}}]}]},
        {"reasoning_effort": MARK},
        {"logit_bias": {MARK: MARK}},
    ]
    return [request_body("chat", MODEL, f"SC04 {MARK}", max_tokens=20, **extra) for extra in extras]


def _calling(arguments: str) -> dict[str, Any]:
    call = {"id": MARK, "type": "function", "function": {"name": MARK, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def others() -> list[tuple[str, Any]]:
    """Routes and bodies beside the chat route."""
    tool_use = {"type": "tool_use", "id": MARK, "name": MARK, "input": {MARK: MARK}}
    tool_result = {"type": "tool_result", "tool_use_id": MARK, "content": MARK, "is_error": True}
    conversation = [
        {"role": "user", "content": f"SC07 {MARK}"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": MARK, "signature": MARK}, tool_use]},
        {"role": "user", "content": [tool_result]},
    ]
    messages = {"model": MODEL, "max_tokens": 20, "messages": conversation, "system": f"{MARK} system"}
    tools = [{"name": f"f_{MARK}", "description": MARK, "input_schema": GOOD_SCHEMA}]
    output = {"type": "function_call_output", "call_id": MARK, "output": MARK}
    call = {"type": "function_call", "call_id": MARK, "name": MARK, "arguments": f'{{"{MARK}'}
    responses = {"model": MODEL, "store": False, "max_output_tokens": 20, "instructions": MARK}
    custom = {"type": "custom", "name": MARK, "format": {"type": "grammar", "syntax": "lark", "definition": MARK}}
    made: list[tuple[str, Any]] = [
        ("/v1/messages", {**messages, "tools": tools, "tool_choice": {"type": "any"}, "metadata": {"user_id": MARK}}),
        ("/v1/messages", {**messages, "messages": [{"role": MARK, "content": MARK}]}),
        ("/v1/messages", {**messages, "messages": [{"role": "user", "content": [{"type": MARK, MARK: MARK}]}]}),
        ("/v1/messages/count_tokens", {**messages, "tools": tools}),
        ("/v1/responses", {**responses, "input": [call, {"type": MARK}]}),
        (
            "/v1/responses",
            {**responses, "input": [call, output]},
        ),
        ("/v1/responses", {**responses, "input": MARK, "previous_response_id": f"resp_{MARK}"}),
        ("/v1/responses", {**responses, "input": MARK, "tools": [custom], "prompt_cache_key": MARK}),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": MARK}),
        ("/tokenize", {"model": MODEL, "prompt": MARK}),
        ("/tokenize", {"model": MODEL, "messages": conversation}),
        ("/detokenize", {"model": MODEL, "tokens": [MARK]}),
        ("/v1/completions", {"model": MODEL, "prompt": MARK, "suffix": MARK}),
        ("/v1/cache/warm", {"model": MODEL, "messages": [{"role": "user", "content": MARK * 30}]}),
        *(("/v1/embeddings", {"model": model, "input": [MARK, f"{MARK} " * 600]}) for model in (EMBEDDER, MODEL)),
        ("/v1/embeddings", {"model": EMBEDDER, "input": {MARK: MARK}}),
        ("/v1/rerank", {"model": EMBEDDER, "query": MARK, "documents": [MARK, {"text": MARK}]}),
        ("/v1/rerank", {"model": EMBEDDER, "query": MARK, "documents": MARK}),
    ]
    # Every body again with its end cut off: what the JSON decoder says of it may quote it.
    return made + [(path, json.dumps(body)[:-5]) for path, body in made]


@pytest.fixture
def guarded(script_model: Path, minilm: Path) -> Iterator[LiveService]:
    service = LiveService({MODEL: script_model, EMBEDDER: minilm}, 'log_level = "debug"\n')
    try:
        service.add_key("alice")
        service.start()
        yield service
    finally:
        service.end()


def test_s02_what_clients_write_stays_theirs(guarded: LiveService) -> None:
    """S02: markers in tools, schemas, grammars, histories, texts to embed and to rank are in no line of a debug log, no
    status, no process's arguments and no file, after refusals, answers and a worker's death by a signal."""
    key = guarded.keys["alice"]
    statuses: dict[int, int] = {}
    with guarded.client(key=key) as client:
        for path, body in [*((PATHS["chat"], body) for body in chats()), *others()]:
            content = body if isinstance(body, str) else json.dumps(body)
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404, 422), (path, content[:300], response.text[:500])
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        for dialect in ("messages", "responses"):  # a third death would close the model for a while
            _die_of_it(guarded, client, dialect)
    assert statuses[200] > 10, statuses
    assert statuses[400] > 40, statuses
    assert_serves(guarded, MODEL, key=key)

    processes = guarded.children()
    shown = " ".join(" ".join(process.cmdline()) for process in processes)
    for command in (("status", "--json"), ("status",), ("top", "--once"), ("cache", "status"), ("plan",)):
        shown += guarded.command(*command).stdout
    assert MARK not in shown
    guarded.stop()
    assert [line[:400] for line in guarded.log.splitlines() if MARK in line or key in line] == []
    assert "Traceback" not in guarded.log
    for path in guarded.home.rglob("*"):
        if path.is_symlink() or "models" in path.parts:
            continue
        assert MARK not in path.name
        assert not path.is_file() or MARK.encode() not in path.read_bytes(), path


def _die_of_it(service: LiveService, client: httpx.Client, dialect: Dialect) -> None:
    """A worker that dies in the midst of an answer, by a signal that makes it print where it was."""
    body = request_body(dialect, MODEL, f"SC20 {MARK}", max_tokens=100_000, stream=True)
    with client.stream("POST", PATHS[dialect], json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        while "la" not in next(lines):
            pass
        os.kill(service.worker_pid(MODEL), signal.SIGABRT)
        rest = "\n".join(lines)
    assert MARK not in rest
    assert_serves(service, MODEL, key=service.keys["alice"])
