"""What an answer must be is what it is: every spelling, both routes, both modes, and beside other rows."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.http_answers import CHAT, COMPLETIONS, Answer, ask, body
from tests.fakes.live_service import LiveService
from tests.fakes.script_model import said_by

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Zürich"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
GBNF = 'root ::= "yes" | "no"'


def constrained(client: httpx.Client, path: str = CHAT, **fields: Any) -> Answer:
    prompt: dict[str, Any] = {"prompt": "hello"} if path == COMPLETIONS else {"said": "hello"}
    return ask(client, body(MODEL, temperature=0, **prompt, **fields), path=path)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": NAMED},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_schema_is_followed(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    """A model that knows no JSON answers in it, and stops when the value is whole; keys come in the schema's order."""
    answer = constrained(client, path, **fields)
    value = json.loads(answer.text)
    assert value in [{"city": city, "days": days} for city in ("Oslo", "Zürich") for days in (1, 2)]
    assert list(value) == ["city", "days"]
    assert answer.finish == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["東京", "no way"]}}, "東京|no way"),
        ({"guided_regex": "a{3}[0-9]{2}"}, "a{3}[0-9]{2}"),
        ({"structured_outputs": {"regex": "x+y"}, "max_tokens": 60}, "x+y?"),
        ({"grammar": GBNF}, "yes|no"),
        ({"guided_grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"structured_outputs": {"grammar": GBNF}}, "yes|no"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_texts_patterns_and_grammars(client: httpx.Client, path: str, fields: dict[str, Any], pattern: str) -> None:
    """vLLM's and llama-server's extensions: the whole text matches."""
    answer = constrained(client, path, **fields)
    assert re.fullmatch(pattern, answer.text), answer


def test_any_object(client: httpx.Client) -> None:
    """`json_object`: an object, or the beginning of one when it was cut."""
    answer = constrained(client, response_format={"type": "json_object"}, max_tokens=60)
    assert answer.text.startswith("{")
    if answer.finish == "stop":
        assert isinstance(json.loads(answer.text), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a("}, "guided_regex"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
        ({"json_schema": {"type": "no such type"}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": 5}}}, "response_format"),
        ({"guided_json": {"$ref": "http://127.0.0.1:9/schema.json"}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_cannot_be_followed_is_refused(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    """B08: before the status line, in both modes, by the client's own name of the field; nothing is ever fetched."""
    answer = constrained(client, path, **fields)
    assert answer.status == 400, answer
    assert answer.error is not None
    assert answer.error["param"] == param


def test_the_sdk_sends_a_schema(service: LiveService, client: httpx.Client) -> None:
    """As the SDK spells it, the answer is JSON of the schema."""
    del client  # afterwards the service must still serve
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0) as sdk:
        completion = sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            response_format=NAMED,  # pyright: ignore[reportArgumentType]
            temperature=0,
        )
    assert json.loads(completion.choices[0].message.content or "").keys() == {"city", "days"}


def test_a_format_beside_tools(client: httpx.Client) -> None:
    """Tools that may be called do not lift the format from the text, nor the format a call."""
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    answer = constrained(client, tools=tools, response_format=NAMED, parallel_tool_calls=False)
    if answer.calls:
        assert answer.finish == "tool_calls"
    else:
        assert json.loads(answer.text).keys() == {"city", "days"}


MIXED: list[dict[str, Any]] = [
    {"said": "hello", "guided_choice": ["yes", "no"]},
    {"said": "SC04"},
    {"said": "hello", "response_format": NAMED},
    {"said": "SC19", "max_tokens": 30},
    {"said": "hello", "guided_regex": "[0-9]{8}"},
    {"said": "SC04", "stop": ["gamma"]},
    {"said": "hello", "json_schema": SCHEMA},
    {"said": "SC02"},
]


def test_h02_constrained_rows_bind_nobody_else(service: LiveService, client: httpx.Client) -> None:
    """H02: eight different rows in one batch: each as it is alone."""
    del client

    def one(at: int) -> tuple[str, str | None]:
        with service.client() as own:
            answer = ask(own, body(MODEL, temperature=0, **MIXED[at % len(MIXED)]))
        return answer.text, answer.finish

    alone = [one(at) for at in range(len(MIXED))]
    assert alone[1] == (said_by("SC04"), "stop")
    with ThreadPoolExecutor(len(MIXED)) as pool:
        assert list(pool.map(one, range(2 * len(MIXED)))) == alone * 2
