"""What the answer must be, in each client's spelling, becomes one constraint, and a mistake names its field."""

import json
from typing import Any

import pytest

from gateway.openai.decode import decode
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.openai.translate import chat_to_generate, completion_to_generate
from protocol.failures import Failure
from protocol.generation import Generate
from protocol.ids import RequestId
from protocol.tools import Constraint, Grammar, JsonObject, JsonSchema, OneOf, Regex

ID = RequestId("r")
SCHEMA = {"type": "object", "properties": {"z": {"const": "ü"}, "a": {}}}
TEXT = '{"type":"object","properties":{"z":{"const":"ü"},"a":{}}}'


def asked(**fields: Any) -> tuple[Generate | Failure, Generate | Failure]:
    """The same fields on both routes."""
    chat_body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    text_body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    chat, text = decode(chat_body, ChatRequest), decode(text_body, CompletionRequest)
    of_chat = chat if isinstance(chat, Failure) else chat_to_generate(chat.request, request_id=ID, cache_scope=b"")
    of_text = (
        text if isinstance(text, Failure) else completion_to_generate(text.request, request_id=ID, cache_scope=b"")
    )
    return (
        of_chat if isinstance(of_chat, Failure) else of_chat[0],
        of_text if isinstance(of_text, Failure) else of_text[0],
    )


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", **fields}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JsonSchema(text=TEXT)),
        ({"response_format": named(schema=SCHEMA, strict=True)}, JsonSchema(text=TEXT)),
        ({"response_format": named(schema=SCHEMA, strict=False)}, JsonSchema(text=TEXT)),
        ({"response_format": named(schema={})}, JsonSchema(text="{}")),
        ({"guided_json": SCHEMA}, JsonSchema(text=TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, JsonSchema(text=TEXT)),
        ({"json_schema": SCHEMA}, JsonSchema(text=TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(text=TEXT)),
        ({"structured_outputs": {"json_object": True}}, JsonObject()),
        ({"guided_regex": "a+"}, Regex(pattern="a+")),
        ({"structured_outputs": {"regex": "a+"}}, Regex(pattern="a+")),
        ({"guided_choice": ["yes", "no", "yes"]}, OneOf(options=("yes", "no"))),
        ({"structured_outputs": {"choice": ["yes"]}}, OneOf(options=("yes",))),
        ({"guided_grammar": 'start: "a"'}, Grammar(text='start: "a"')),
        ({"grammar": 'root ::= "a"'}, Grammar(text='root ::= "a"')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(text='start: "a"')),
        ({"grammar": "", "response_format": {"type": "json_object"}}, JsonObject()),
    ],
)
def test_each_spelling(fields: dict[str, Any], constraint: Constraint | None) -> None:
    """OpenAI's, vLLM's old and new one, llama-server's; a schema is enforced, strict or not, with its keys in order."""
    for generate in asked(**fields):
        assert isinstance(generate, Generate), generate
        assert generate.constraint == constraint


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": named()}, "response_format.json_schema.schema"),
        ({"response_format": named(schema=True)}, "response_format.json_schema.schema"),
        ({"response_format": named(schema=nested(70))}, "response_format.json_schema.schema"),
        ({"response_format": named(schema={"a": 2**64})}, "response_format.json_schema.schema"),
        ({"response_format": named(schema={"a": "x" * 70_000})}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"json_schema": "nonsense"}, "json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["x" * 1000] * 1000}, "guided_choice"),
        ({"guided_choice": [str(number) for number in range(2000)]}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"grammar": "a" * 70_000}, "grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ],
)
def test_a_wrong_one_is_named(fields: dict[str, Any], param: str) -> None:
    """C12: both routes refuse alike what cannot be enforced, is contradicted, or is too big to compile."""
    for failure in asked(**fields):
        assert isinstance(failure, Failure), failure
        assert failure.param == param
