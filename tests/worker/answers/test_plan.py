"""Which format a model writes, by what is known of it; and how values without types become JSON."""

import json
from typing import Any

import pytest

from protocol.generation import ChatMessage, ToolCall
from protocol.tools import Tool, ToolUse
from tests.worker.answers.reading import TOOLS
from worker.answers import formats
from worker.answers.coercion import coerced
from worker.answers.plan import AnswerFormats, AnswerPlan, formats_of, plan
from worker.answers.thinking import ThinkSyntax
from worker.answers.tool_preamble import told_of_tools
from worker.answers.validity import are_arguments_valid

THINK = ThinkSyntax(opens=("<think>",), closes=("</think>",))


@pytest.mark.parametrize(
    ("template", "mlx_lm", "name"),
    [
        ("{% if tools %} <tool_call> {{ tool_call.name }}", "json_tools", "hermes"),
        ("{% if tools %} <tool_call> {{ tool_call['name'] }}", None, "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder", "qwen_coder"),
        ("<arg_key>", "glm47", "glm"),
        ("<minimax:tool_call>", "minimax_m2", "minimax"),
        ("<|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
        ("[TOOL_CALLS] [ARGS]", "mistral", "mistral_named"),
        ("[TOOL_CALLS] [", "mistral", "mistral_list"),
        ("<|tool_call>", "gemma4", "gemma4"),
        ("<start_function_call>", "function_gemma", "function_gemma"),
        ("<|tool_call_start|>", "pythonic", "lfm2"),
        ('<|start_header_id|> <|python_tag|> "parameters"', None, "llama"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> ```json", None, "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", None, "deepseek_v31"),
        ("<|tool_call|>", None, "granite_list"),
        ("<|tool_call|> <|/tool_call|>", None, "phi"),
        ("<|START_ACTION|>", None, "command"),
        ("Action: ```json", None, "command_r"),
        ("<seed:tool_call> <function=", None, "seed"),
    ],
)
def test_a_models_format(template: str, mlx_lm: str | None, name: str) -> None:
    """By mlx-lm's own inference, else by the template."""
    found = formats_of(template=template, vocabulary=set(), tool_parser_type=mlx_lm)

    assert found.calls is not None
    assert found.calls.name == name


def test_the_vocabulary_of_gpt_oss() -> None:
    """Its template is long and changes; its special tokens do not."""
    found = formats_of(template="", vocabulary={"<|start|>", "<|channel|>", "<|message|>", "<|call|>"})

    assert found.calls is formats.HARMONY


def test_a_family_that_only_mlx_lm_knows() -> None:
    """Its markers and its parser are taken as they are."""
    found = formats_of(
        template="<atem:function_calls>",
        vocabulary=set(),
        tool_parser_type="muse_spark",
        foreign_parser=lambda text, tools: {"name": text, "arguments": {}},
        foreign_opens="<atem:function_calls>",
        foreign_closes="</atem:function_calls>",
    )

    assert found.calls is not None
    assert found.calls.opens == ("<atem:function_calls>",)
    assert found.foreign_parser is not None


def made(model: AnswerFormats, tools: tuple[Tool, ...], tool_use: ToolUse | None, **more: Any) -> AnswerPlan:
    settings: dict[str, Any] = {"told_by": "template", "reasoning": "split", "tail": "", **more}
    return plan(model, tools=tools, tool_use=tool_use, **settings)


def test_what_a_request_asks_to_be_told_apart() -> None:
    """A05: calls are looked for only if there are tools and a use of them; reasoning only if it is to be split."""
    model = AnswerFormats(thinking=THINK, calls=formats.GLM)

    assert made(model, TOOLS, ToolUse()).form is formats.GLM
    assert made(model, TOOLS, ToolUse(), told_by="preamble").form is formats.HERMES
    assert made(AnswerFormats(), TOOLS, ToolUse()).form is formats.HERMES
    assert made(model, (), ToolUse()).form is None
    assert made(model, TOOLS, None).form is None
    assert made(model, TOOLS, None, tail="<think>\n").starts == "thinking"
    assert made(model, TOOLS, None, tail="<think>\n", reasoning="keep").parser() is None
    assert made(AnswerFormats(), (), None).parser() is None


# --- values without types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("null", {"type": "string"}, "null"),
        (' {"a": 1} ', {"type": "string"}, ' {"a": 1} '),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12),
        ("12.5", {"type": "integer"}, "12.5"),
        ("twelve", {"type": "integer"}, "twelve"),
        ("1e3", {"type": "number"}, 1000.0),
        ("7", {"type": "number"}, 7),
        ("nan", {"type": "number"}, "nan"),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("{a}", {"type": "object"}, "{a}"),
        ("2", {"enum": [1, 2, 3]}, 2),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("3", {"$ref": "#/$defs/Count"}, 3),
        ("3", {"$ref": "https://example.org/schema"}, 3),
        ("3", None, 3),
        ("Oslo", None, "Oslo"),
        ('"Oslo"', None, '"Oslo"'),
        ("true", {}, True),
    ],
)
def test_a_value_is_what_its_schema_asks_for(text: str, schema: Any, value: object) -> None:
    """A03: where the format writes all values bare; what fits nothing stays the text that it is."""
    found = coerced(text, schema, {"$defs": {"Count": {"type": "integer"}}})

    assert found == value
    assert type(found) is type(value)


def test_a_schema_that_refers_to_itself_ends() -> None:
    """However a client's schema is made."""
    root = {"$defs": {"A": {"$ref": "#/$defs/A"}}}

    assert coerced("1", {"$ref": "#/$defs/A"}, root) == 1


@pytest.mark.parametrize(
    ("schema", "arguments", "is_valid"),
    [
        ({"type": "object", "required": ["a"]}, '{"a": 1}', True),
        ({"type": "object", "required": ["a"]}, "{}", False),
        ({"type": "object"}, "[1]", False),
        ({"type": "object"}, "{", False),
        (None, "{}", True),
        ({"type": "no such type"}, "{}", True),
        ({"properties": {"a": {"$ref": "https://example.org/never-fetched"}}}, '{"a": 1}', True),
        ({"properties": {"a": {"pattern": "^(x+)+$"}}}, json.dumps({"a": "x" * 200 + "y"}), True),
        ({"properties": {"a": {"enum": ["y"] * 10}}}, json.dumps({"a": "x" * 200_000}), True),
        ({"properties": 7}, '{"a": 1}', True),
    ],
)
def test_validity_is_said_only_where_it_is_sure_and_cheap(schema: Any, arguments: str, is_valid: bool) -> None:  # noqa: FBT001
    """No expression of a client runs, nothing is fetched, no schema is an exception."""
    tool = Tool(name="f", parameters=schema)

    assert are_arguments_valid("f", arguments, (tool,)) is is_valid


# --- the preamble ----------------------------------------------------------------------------------------------------


def test_a_conversation_with_tools_in_plain_text() -> None:
    """Tools in the client's order behind its own instruction; calls and results in roles that every template knows."""
    call = ToolCall(id="c1", name="get_weather", arguments={"city": "Ålesund"})
    told = told_of_tools(
        (
            ChatMessage(role="system", content="be brief"),
            ChatMessage(role="user", content="weather?"),
            ChatMessage(role="assistant", content="", tool_calls=(call, call)),
            ChatMessage(role="tool", content="12", tool_call_id="c1"),
            ChatMessage(role="tool", content="13", tool_call_id="c1"),
        ),
        TOOLS,
    )

    assert [message.role for message in told] == ["system", "user", "assistant", "user"]
    assert told[0].content.startswith("be brief\n\n")
    places = [told[0].content.index(f'"{tool.name}"') for tool in TOOLS]
    assert places == sorted(places)
    assert told[2].content.count('{"name": "get_weather", "arguments": {"city": "Ålesund"}}') == 2
    assert told[3].content == "<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response>"
