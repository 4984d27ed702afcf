"""What each family of models writes, in its documented form: the calls in it, whole and cut at every character."""

import json
from typing import Any, NamedTuple

import pytest

from tests.worker.answers.reading import parser_of, read
from worker.answers import formats
from worker.answers.formats import CallFormat


class Recorded(NamedTuple):
    """An answer of one family, the calls in it (arguments decoded), and the text beside them."""

    form: CallFormat
    answer: str
    calls: list[tuple[str, dict[str, Any]]]
    text: str = ""


OSLO = ("get_weather", {"city": "Oslo"})
OSLO_3 = ("get_weather", {"city": "Oslo", "days": 3})
CET = ("get_time", {"tz": "CET"})
LONG = {"path": "notes/täglich.md", "text": 'first "line"\n\tsecond }] line \\ end', "lines": [1, 2, 30], "options": {}}
LONG_JSON = json.dumps(LONG, ensure_ascii=False)
EDIT = ("edit_file", LONG)

RECORDED: dict[str, Recorded] = {
    # JSON between markers
    "hermes": Recorded(
        formats.HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>', [OSLO]
    ),
    "hermes two, text before": Recorded(
        formats.HERMES,
        'I look it up.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {"tz": "CET"}}\n</tool_call>',
        [OSLO, CET],
        "I look it up.",
    ),
    "hermes long": Recorded(
        formats.HERMES, f'<tool_call>\n{{"name": "edit_file", "arguments": {LONG_JSON}}}\n</tool_call>', [EDIT]
    ),
    "hermes, arguments first": Recorded(
        formats.HERMES, '<tool_call>{"arguments": {"tz": "CET"}, "name": "get_time"}</tool_call>', [CET]
    ),
    "hermes, arguments as text": Recorded(
        formats.HERMES, '<tool_call>{"name": "get_time", "arguments": "{\\"tz\\": \\"CET\\"}"}</tool_call>', [CET]
    ),
    "hermes, no arguments": Recorded(
        formats.HERMES, '<tool_call>\n{"name": "get_time"}\n</tool_call>', [("get_time", {})]
    ),
    "hermes, text after": Recorded(
        formats.HERMES,
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n\nDone.',
        [("get_time", {})],
        "Done.",
    ),
    "hermes, markers in a value": Recorded(
        formats.HERMES,
        '<tool_call>{"name": "edit_file", "arguments": {"text": "<tool_call></tool_call>"}}</tool_call>',
        [("edit_file", {"text": "<tool_call></tool_call>"})],
    ),
    "hermes, the end closes it": Recorded(
        formats.HERMES, '<tool_call>\n{"name": "get_time", "arguments": {"tz": "CET"}}', [CET]
    ),
    "granite 4": Recorded(
        formats.HERMES, '<tool_call>\n{"name": "get_time", "arguments": {"tz": "CET"}}\n</tool_call>', [CET]
    ),
    # lists
    "mistral list": Recorded(
        formats.MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}, '
        '{"name": "get_time", "arguments": {"tz": "CET"}}]',
        [OSLO_3, CET],
    ),
    "mistral list with ids": Recorded(
        formats.MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "get_time", "arguments": {"tz": "CET"}, "id": "aB3dE5gH7"}]',
        [CET],
    ),
    "mistral named": Recorded(formats.MISTRAL_NAMED, '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', [OSLO]),
    "mistral named two": Recorded(
        formats.MISTRAL_NAMED,
        f'[TOOL_CALLS]edit_file[ARGS]{LONG_JSON}[TOOL_CALLS]get_time[ARGS]{{"tz": "CET"}}',
        [EDIT, CET],
    ),
    "mistral named, one marker": Recorded(
        formats.MISTRAL_NAMED,
        '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Oslo"}get_time[ARGS]{"tz": "CET"}',
        [OSLO, CET],
    ),
    "granite 3": Recorded(
        formats.GRANITE_LIST, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]', [OSLO]
    ),
    "phi 4 mini": Recorded(
        formats.PHI,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "get_time", "arguments": {"tz": "CET"}}]<|/tool_call|>',
        [OSLO, CET],
    ),
    "command a": Recorded(
        formats.COMMAND,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {"tz": "CET"}}\n]<|END_ACTION|>',
        [OSLO, CET],
    ),
    "command r": Recorded(
        formats.COMMAND_R,
        'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": {"city": "Oslo"}\n    }\n]\n```',
        [OSLO],
    ),
    "apriel": Recorded(
        formats.TOOL_CALLS,
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "1"}, {"name": "get_time", "arguments": {"tz": "CET"}}]</tool_calls>',
        [OSLO, CET],
    ),
    "minimax m1": Recorded(
        formats.TOOL_CALLS,
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n{"name": "get_time", "arguments": {"tz": "CET"}}\n</tool_calls>',
        [OSLO, CET],
    ),
    "nemotron nano 2": Recorded(
        formats.NEMOTRON, '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>', [OSLO]
    ),
    "apertus": Recorded(
        formats.APERTUS,
        '<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}, {"get_time": {"tz": "CET"}}]<|tools_suffix|>',
        [OSLO, CET],
    ),
    "gigachat 3.1": Recorded(
        formats.GIGACHAT, '<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}', [OSLO]
    ),
    "functionary 3.1": Recorded(
        formats.FUNCTIONARY,
        '<function=get_weather>{"city": "Oslo"}</function><function=get_time>{"tz": "CET"}</function>',
        [OSLO, CET],
    ),
    "solar": Recorded(
        formats.SOLAR,
        '<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Oslo"}<|tool_call:end|>'
        '<|tool_call:begin|>b2<|tool_call:name|>get_time<|tool_call:args|>{"tz": "CET"}<|tool_call:end|><|calls|>',
        [OSLO, CET],
    ),
    "deepseek v4": Recorded(
        formats.DEEPSEEK_V32,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n<｜DSML｜parameter name="tz" string="true">CET</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        [CET],
    ),
    # Llama
    "llama": Recorded(formats.LLAMA, '{"name": "get_weather", "parameters": {"city": "Oslo"}}', [OSLO]),
    "llama two": Recorded(
        formats.LLAMA,
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "get_time", "parameters": {"tz": "CET"}}',
        [OSLO, CET],
    ),
    "llama with a type": Recorded(
        formats.LLAMA, '{"type": "function", "name": "get_time", "parameters": {"tz": "CET"}}', [CET]
    ),
    "llama with its tag": Recorded(
        formats.LLAMA, '<|python_tag|>{"name": "get_time", "parameters": {"tz": "CET"}}', [CET]
    ),
    "llama built-in": Recorded(
        formats.LLAMA, '<|python_tag|>brave_search.call(query="fjord")', [("brave_search", {"query": "fjord"})]
    ),
    "llama long": Recorded(formats.LLAMA, f'{{"name": "edit_file", "parameters": {LONG_JSON}}}', [EDIT]),
    "llama in python": Recorded(
        formats.LLAMA, "[get_weather(city='Oslo', days=3), get_time(tz=\"CET\")]", [OSLO_3, CET]
    ),
    "llama 4 in python": Recorded(formats.LLAMA, '<|python_start|>[get_time(tz="CET")]<|python_end|>', [CET]),
    "llama, other json": Recorded(formats.LLAMA, '{"answer": 42}', [], '{"answer": 42}'),
    "llama, a list": Recorded(
        formats.LLAMA, "[see(here)](https://example.org)", [], "[see(here)](https://example.org)"
    ),
    # DeepSeek
    "deepseek v3": Recorded(
        formats.DEEPSEEK_V3,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n"
        '```json\n{"tz": "CET"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [OSLO, CET],
    ),
    "deepseek v3.1": Recorded(
        formats.DEEPSEEK_V31,
        'Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        f"<｜tool▁call▁begin｜>edit_file<｜tool▁sep｜>{LONG_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [OSLO, EDIT],
        "Let me see.",
    ),
    "deepseek v3.2": Recorded(
        formats.DEEPSEEK_V32,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [OSLO_3],
    ),
    # Kimi
    "kimi k2": Recorded(
        formats.KIMI_K2,
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}'
        '<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{"tz": "CET"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [OSLO, CET],
    ),
    # gpt-oss
    "harmony": Recorded(
        formats.HARMONY,
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        [OSLO],
    ),
    "harmony, the recipient in the role": Recorded(
        formats.HARMONY,
        '<|start|>assistant to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>{"tz":"CET"}',
        [CET],
    ),
    "harmony long": Recorded(
        formats.HARMONY, f"<|channel|>commentary to=functions.edit_file <|constrain|>json<|message|>{LONG_JSON}", [EDIT]
    ),
    # tags around names and values
    "qwen coder": Recorded(
        formats.QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        [OSLO_3, ("get_time", {})],
    ),
    "qwen coder types": Recorded(
        formats.QWEN_CODER,
        "<tool_call>\n<function=edit_file>\n<parameter=path>\n12\n</parameter>\n<parameter=text>\n  if a < b:\n\n    pass\n"
        "\n</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n<parameter=options>\n{'a': True, 'b': None}\n</parameter>\n"
        "<parameter=ratio>\n0.5\n</parameter>\n<parameter=backup>\nnull\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "edit_file",
                {
                    "path": "12",
                    "text": "  if a < b:\n\n    pass\n",
                    "lines": [1, 2],
                    "options": {"a": True, "b": None},
                    "ratio": 0.5,
                    "backup": None,
                },
            )
        ],
    ),
    "qwen coder, markers in a value": Recorded(
        formats.QWEN_CODER,
        "<tool_call>\n<function=edit_file>\n<parameter=text>\na </tool_call> b </parameter> c\n</parameter>\n</function>\n"
        "</tool_call>",
        [("edit_file", {"text": "a </tool_call> b </parameter> c"})],
    ),
    "qwen coder in json": Recorded(
        formats.QWEN_CODER, '<tool_call>\n{"name": "get_time", "arguments": {"tz": "CET"}}\n</tool_call>', [CET]
    ),
    "seed": Recorded(
        formats.SEED,
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        [OSLO],
    ),
    "glm": Recorded(
        formats.GLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time<arg_key>tz</arg_key><arg_value>CET</arg_value></tool_call>",
        [OSLO_3, CET],
    ),
    "minimax m2": Recorded(
        formats.MINIMAX,
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="hourly">true</parameter>\n</invoke>\n<invoke name="get_time">\n'
        '<parameter name="tz">CET</parameter>\n</invoke>\n</minimax:tool_call>',
        [("get_weather", {"city": "Oslo", "hourly": True}), CET],
    ),
    "longcat": Recorded(
        formats.LONGCAT,
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Oslo</longcat_arg_value>\n</longcat_tool_call>",
        [OSLO],
    ),
    # Gemma and LFM2
    "gemma 4": Recorded(
        formats.GEMMA4,
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:edit_file{options:{a:[1,true],b:<|"|>{x:1}, y<|"|>},text:<|"|><|"|>}<tool_call|>',
        [OSLO_3, ("edit_file", {"options": {"a": [1, True], "b": "{x:1}, y"}, "text": ""})],
    ),
    "function gemma": Recorded(
        formats.FUNCTION_GEMMA,
        "<start_function_call>call:edit_file{path:<escape>a, b: c<escape>,options:{a:{b:1}}}<end_function_call>",
        [("edit_file", {"path": "a, b: c", "options": {"a": {"b": 1}}})],
    ),
    "lfm2": Recorded(
        formats.LFM2,
        '<|tool_call_start|>[get_weather(city="Oslo", days=3), get_time(tz="CET")]<|tool_call_end|>Checking.',
        [OSLO_3, CET],
        "Checking.",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_an_answer_of_this_family(name: str) -> None:
    """Its calls with the arguments that were meant, nothing of a marker in the text, no warning."""
    recorded = RECORDED[name]
    answer = read(parser_of(recorded.form), [recorded.answer])

    assert [(call, json.loads(arguments)) for call, arguments in answer.whole] == recorded.calls
    assert len(answer.calls) == len(recorded.calls)
    assert answer.text == recorded.text
    assert answer.warnings == ()


FORMS = {recorded.form.name: recorded.form for recorded in RECORDED.values()}


@pytest.mark.parametrize("name", FORMS)
def test_a_forced_call_is_read_back(name: str) -> None:
    """A06: what a grammar makes of a format's syntax is a call, for every family."""
    form = FORMS[name]
    syntax = form.syntax
    calls = [("get_weather", {"city": "Oslo"}), ("edit_file", LONG)][: syntax.max_calls]
    written = syntax.separator.join(
        f"{syntax.before_name}{tool}{syntax.before_arguments}{json.dumps(arguments)}{syntax.after_arguments}"
        for tool, arguments in calls
    )
    answer = read(parser_of(form), f"{syntax.section_start}{written}{syntax.section_end}")

    assert [(tool, json.loads(arguments)) for tool, arguments in answer.whole] == calls
    assert (answer.text, answer.warnings) == ("", ())
    assert all(marker in f"{syntax.section_start}{written}{syntax.section_end}" for marker in syntax.markers)


@pytest.mark.parametrize("name", RECORDED)
def test_streaming_finds_the_same(name: str) -> None:
    """A01: cut at every single place, and character by character, the joined answer is the one of the whole text."""
    recorded = RECORDED[name]
    whole = read(parser_of(recorded.form), [recorded.answer])
    text = recorded.answer

    for at in range(1, len(text)):
        assert read(parser_of(recorded.form), [text[:at], text[at:]]) == whole
    assert read(parser_of(recorded.form), text) == whole


@pytest.mark.parametrize("name", RECORDED)
def test_a_cut_answer_loses_nothing(name: str) -> None:
    """A04: wherever the token limit cuts it, what was written is text, or an argument of a call; nothing is invented."""
    recorded = RECORDED[name]
    for end in range(len(recorded.answer)):
        text = recorded.answer[:end]
        answer = read(parser_of(recorded.form), text, "length")

        if not answer.calls:
            assert answer.text == text
        whole = [(call, json.loads(arguments)) for call, arguments in answer.whole]
        assert whole == recorded.calls[: len(whole)]
        for call in answer.calls[len(whole) :]:
            assert answer.warnings == ("tool_call_cut",)
            assert call.arguments
