"""Grammars of constraints and calls, as llguidance takes them: what they let through, and what they do not."""

import json
import time
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from protocol.tools import Constraint, Grammar, JsonObject, JsonSchema, OneOf, Regex, Tool
from tests.fakes.char_tokenizer import END, char_tokenizer
from worker.answers.call_syntax import HERMES, LLAMA, MISTRAL_LIST, CallSyntax
from worker.constrained import TokenizerUnsupported
from worker.grammar_compiler import GrammarCompiler
from worker.grammars import MAX_CONSTRAINT_CHARACTERS, Calls, Frame, GrammarRefused, grammar, spelled
from worker.sequence import Matcher

WIDTH = 96
"""More than the tokenizer knows, as models' logits often are."""

TOKENIZER = char_tokenizer()
IDS: Mapping[str, int] = TOKENIZER.get_vocab()  # pyright: ignore[reportUnknownMemberType, reportAssignmentType]
COMPILER = GrammarCompiler(TOKENIZER, WIDTH, [IDS[END]])
Verdict = Literal["taken", "refused"]
THINK = Frame(opens="<think>", closes="</think>", begins="answer", markers=("<think>", "</think>"))


def matcher(
    answer: Constraint | None, calls: Calls | None = None, frame: Frame | None = None, special: tuple[str, ...] = ()
) -> Matcher:
    return COMPILER.compile(grammar(answer, calls, frame, COMPILER.special_ids(special)))


def allowed(row: Matcher) -> list[int]:
    mask = int.from_bytes(row.next_mask(), "little")
    return [token for token in range(WIDTH) if mask >> token & 1]


def takes(row: Matcher, text: str) -> bool:
    """Whether the text's tokens can be drawn one after another, and then the end."""
    for token in TOKENIZER.encode(text):
        if token not in allowed(row):
            return False
        row.consume(token)
    return IDS[END] in allowed(row)


# --- constraints ----------------------------------------------------------------------------------------------------

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("constraint", "text", "verdict"),
    [
        (JsonSchema(text=PERSON), '{"name": "ok", "age": 12}', "taken"),
        (JsonSchema(text=PERSON), '{"name":"ok"}', "taken"),
        (JsonSchema(text=PERSON), '{"age": 12}', "refused"),
        (JsonSchema(text=PERSON), '{"name": "ok", "size": 1}', "refused"),
        (JsonSchema(text=PERSON), '{"name": 1}', "refused"),
        (JsonSchema(text=PERSON), '{"name": "ok"', "refused"),
        (JsonSchema(text=PERSON), ' {"name": "ok"}', "refused"),
        (JsonSchema(text=PERSON), '{"name":  "ok"}', "refused"),  # a small model could go on like this for ever
        (JsonSchema(text=PERSON), '{\n"name": "ok"}', "refused"),
        (JsonSchema(text="{}"), "[1, 2]", "taken"),
        (JsonSchema(text="true"), '"x"', "taken"),
        (JsonSchema(text='{"enum": ["a", 1]}'), "1", "taken"),
        (JsonSchema(text='{"enum": ["a", 1]}'), "2", "refused"),
        (JsonSchema(text='{"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}'), "7", "taken"),
        (JsonSchema(text='{"type": "string", "pattern": "^a+$"}'), '"aa"', "taken"),
        (JsonSchema(text='{"type": "string", "pattern": "^a+$"}'), '"ab"', "refused"),
        (JsonObject(), '{"a": [true, {}]}', "taken"),
        (JsonObject(), "[]", "refused"),
        (Regex(pattern="[0-9]{2}/[ab]"), "12/a", "taken"),
        (Regex(pattern="[0-9]{2}\\/[ab]"), "12/b", "taken"),
        (Regex(pattern="[0-9]{2}"), "123", "refused"),
        (Regex(pattern="^(yes|no)$"), "no", "taken"),
        (Regex(pattern="a\nb"), "a\nb", "taken"),
        (Regex(pattern=""), "", "taken"),
        (Regex(pattern=""), "a", "refused"),
        (OneOf(options=("yes", 'a "b"', "y")), 'a "b"', "taken"),
        (OneOf(options=("yes", 'a "b"', "y")), "y", "taken"),
        (OneOf(options=("yes", 'a "b"', "y")), "ye", "refused"),
        (Grammar(text='start: "a" NUM\nNUM: /[0-9]+/'), "a12", "taken"),
        (Grammar(text='start: "a" NUM\nNUM: /[0-9]+/'), "b", "refused"),
        (Grammar(text='root ::= "a" [0-9]+ | "b"'), "b", "taken"),
        (Grammar(text='root ::= "a" [0-9]+ | "b"'), "a", "refused"),
    ],
)
def test_what_an_answer_may_be(constraint: Constraint, text: str, verdict: Verdict) -> None:
    """Exactly what the constraint says; JSON on one line."""
    assert takes(matcher(constraint), text) is (verdict == "taken")


@pytest.mark.parametrize(
    "constraint",
    [
        # no answer is possible
        JsonSchema(text='{"type": "object", "properties": {"a": false}, "required": ["a"]}'),
        JsonSchema(text='{"type": "integer", "minimum": 5, "maximum": 1}'),
        JsonSchema(text='{"enum": []}'),
        JsonSchema(text="false"),
        JsonSchema(text='{"$ref": "#"}'),
        OneOf(options=()),
        Grammar(text="start: start"),
        # no schema, pattern, grammar
        JsonSchema(text="{"),
        JsonSchema(text="[]"),
        JsonSchema(text='{"type": "objekt"}'),
        JsonSchema(text='{"$ref": "#/$defs/absent"}'),
        Regex(pattern="("),
        Grammar(text="no grammar at all"),
        Grammar(text='start: "a" other'),
        Grammar(text="start: @arguments0"),
        # what no grammar can say
        JsonSchema(text='{"not": {"type": "string"}}'),
        JsonSchema(text='{"type": "array", "uniqueItems": true}'),
        JsonSchema(text='{"type": "string", "format": "of my own"}'),
        Regex(pattern="(?=a)b"),
        # nothing outside this machine, or of it, is read
        JsonSchema(text='{"$ref": "https://example.com/schema.json"}'),
        JsonSchema(text='{"$ref": "file:///etc/hostname"}'),
        Grammar(text='start: %json {"$ref": "file:///etc/hostname"}'),
        # what would explode
        JsonSchema(text='{"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}'),
        Regex(pattern="((a{1000}){1000}){1000}"),
        JsonSchema(
            text=json.dumps(
                {
                    "allOf": [
                        {"anyOf": [{"properties": {f"{side}{i}": {"type": "integer"}}} for side in "ab"]}
                        for i in range(30)
                    ]
                }
            )
        ),
        JsonSchema(text='{"items":' * 500 + "{}" + "}" * 500),
        JsonSchema(text='{"items":' * 5000 + "{}" + "}" * 5000),
        JsonSchema(text=json.dumps({"enum": ["x" * 20] * 20_000})),
        Regex(pattern="a" * (MAX_CONSTRAINT_CHARACTERS + 1)),
        Grammar(text="start: " + "(" * 9000 + '"a"' + ")" * 9000),
        Grammar(text="root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    ],
)
def test_a_bad_constraint_is_refused(constraint: Constraint) -> None:
    """With a reason in one line, at once and not by a row that ends early; a worst case takes less than a second."""
    started = time.perf_counter()
    with pytest.raises(GrammarRefused) as refused:
        matcher(constraint)

    assert 0 < len(str(refused.value)) < 600
    assert time.perf_counter() - started < 10  # thirty times what it takes on an idle core: nothing ran away


def test_large_and_recursive_is_fine() -> None:
    """Sixty objects with formats and patterns; a tree of any depth."""
    item = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "at": {"type": "string", "format": "date-time"},
            "name": {"type": "string", "minLength": 1, "maxLength": 255},
            "code": {"type": "string", "pattern": "^[A-Z]{2,8}-[0-9]{1,12}$"},
            "kind": {"enum": [f"kind {i}" for i in range(50)]},
            "lines": {"type": "array", "items": {"type": "string", "maxLength": 4000}, "maxItems": 500},
        },
        "required": ["id", "at", "name"],
    }
    names = [f"o{i}" for i in range(60)]
    large = {"type": "object", "properties": dict.fromkeys(names, item), "required": names}
    tree = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]}

    assert allowed(matcher(JsonSchema(text=json.dumps(large)))) == [IDS['{"']]
    assert takes(matcher(JsonSchema(text=json.dumps(tree))), '{"c":[{"c":[]},{"c":[{"c":[]}]}]}')


def test_no_properties_are_invented() -> None:
    """An object that names its properties has no others; one that says so, or names none, has what it likes."""
    named, said = '{"properties": {"a": {}}}', '{"properties": {"a": {}}, "additionalProperties": true}'

    assert not takes(matcher(JsonSchema(text=named)), '{"b":1}')
    assert takes(matcher(JsonSchema(text=said)), '{"b":1}')
    assert takes(matcher(JsonSchema(text='{"type": "object"}')), '{"b":1}')


def test_what_is_wrong_is_said_without_our_own_text() -> None:
    """A pattern's author reads of the pattern, not of the grammar around it."""
    with pytest.raises(GrammarRefused) as refused:
        matcher(Regex(pattern="a("))

    assert "unclosed group" in str(refused.value)
    assert "start:" not in str(refused.value)


def test_a_clients_own_options_count_for_nothing() -> None:
    """Whitespace is ours to decide; leniency would make a promise that is not kept."""
    lenient = JsonSchema(text='{"not": {}, "x-guidance": {"lenient": true}}')
    wide = JsonSchema(text='{"type": "array", "x-guidance": {"whitespace_flexible": true}}')

    with pytest.raises(GrammarRefused):
        matcher(lenient)
    assert not takes(matcher(wide), "[  ]")


# --- reasoning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [(), ("<mark>", "</mark>")])
@pytest.mark.parametrize(
    ("begins", "text", "verdict"),
    [
        ("answer", "1", "taken"),
        ("answer", "<mark>so {what}\n\n1 / 2</mark>\n\n1", "taken"),
        ("answer", "<mark></mark>1", "taken"),
        ("answer", "<mark>no end", "refused"),
        ("answer", "so</mark>1", "refused"),
        ("answer", "<mark>so</mark>x", "refused"),
        ("thinking", "so </ma </mark>\n1", "taken"),
        ("thinking", "1", "refused"),
        ("thinking", "so</mark>\n\n\n1", "refused"),
    ],
)
def test_reasoning_is_free(special: tuple[str, ...], begins: Any, text: str, verdict: Verdict) -> None:
    """The answer alone is held to its form, whether markers are tokens of their own or text."""
    frame = Frame(opens="<mark>", closes="</mark>", begins=begins, markers=("<mark>", "</mark>"))
    if not special:
        frame = Frame(opens="<think>", closes="</think>", begins=begins, markers=("<think>", "</think>"))
        text = text.replace("mark>", "think>").replace("</ma ", "</thi ")

    assert takes(matcher(JsonSchema(text='{"type": "integer"}'), frame=frame, special=special), text) is (
        verdict == "taken"
    )


def test_an_end_of_reasoning_in_other_tokens() -> None:
    """A marker that is one token may be written in pieces, too: readers of the text see the same end, so it is one."""
    frame = Frame(opens="<mark>", closes="</mark>", begins="thinking", markers=("<mark>", "</mark>"))
    row = matcher(JsonSchema(text='{"type": "integer"}'), frame=frame, special=frame.markers)
    for character in "so </mark":
        row.consume(IDS["Ġ" if character == " " else character])
    assert IDS["o"] in allowed(row)

    row.consume(IDS[">"])
    assert IDS["o"] not in allowed(row)
    assert IDS["</mark>"] not in allowed(row)
    assert takes(row, "12")


def test_a_model_with_channels() -> None:
    """Reasoning, its end and the answer's head are markers in a row; the head is not left out."""
    frame = Frame(
        opens="<mark>analysis",
        closes="</mark>start",
        begins="answer",
        before="<mark>final ",
        after="</mark>",
        markers=("<mark>", "</mark>"),
    )

    def is_taken(text: str) -> bool:
        return takes(matcher(JsonObject(), frame=frame, special=frame.markers), text)

    assert is_taken("<mark>analysis hm</mark>start<mark>final {}</mark>")
    assert is_taken("<mark>final {}</mark>")
    assert not is_taken("{}")


# --- calls ----------------------------------------------------------------------------------------------------------

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool(name="get_weather", parameters=CITY), Tool(name="get_weather_at"), Tool(name="any", parameters={}))


def calls_of(syntax: CallSyntax = HERMES, calls: Any = "many", tools: tuple[Tool, ...] = TOOLS) -> Calls:
    return Calls(tools=tools, syntax=syntax, calls=calls)


def written(name: str, arguments: str, syntax: CallSyntax = HERMES) -> str:
    return f"{syntax.before_name}{name}{syntax.before_arguments}{arguments}{syntax.after_arguments}"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (written("get_weather", '{"city": "oslo"}'), "taken"),
        (written("get_weather_at", "{}"), "taken"),
        (written("any", '{"x": [1]}'), "taken"),
        (written("any", "{}") + "\n" + written("get_weather_at", "{}"), "taken"),
        (written("get_weather", "{}"), "refused"),
        (written("get_weather_at", '{"x": 1}'), "refused"),
        (written("any", "[]"), "refused"),
        (written("other", "{}"), "refused"),
        ("hello", "refused"),
        ("", "refused"),
        (written("any", "{}") + "hello", "refused"),
    ],
)
def test_a_required_call(text: str, verdict: Verdict) -> None:
    """A06: one call or more of the tools, with their arguments, and nothing else."""
    assert takes(matcher(None, calls_of()), text) is (verdict == "taken")


def test_one_call_only() -> None:
    """Calls "one": the end is forced behind it."""
    row = matcher(None, calls_of(calls="one"))

    assert takes(row, written("any", "{}"))
    assert allowed(row) == [IDS[END]]


@pytest.mark.parametrize("syntax", [MISTRAL_LIST, LLAMA])
def test_calls_of_other_families(syntax: CallSyntax) -> None:
    """Sections around the calls, separators between them."""
    lower = CallSyntax(  # the test's tokenizer has few characters
        section_start=syntax.section_start.lower(),
        before_name=syntax.before_name,
        before_arguments=syntax.before_arguments,
        after_arguments=syntax.after_arguments,
        separator=syntax.separator.replace(";", ","),
        section_end=syntax.section_end,
    )
    call = written("any", "{}", lower)

    for count, is_taken in ((0, False), (1, True), (3, True)):
        text = lower.section_start + lower.separator.join([call] * count) + lower.section_end
        assert takes(matcher(None, calls_of(lower)), text) is is_taken


def test_call_markers_that_are_tokens() -> None:
    """A marker that is one special token is that token, and its letters are not enough."""
    syntax = CallSyntax(
        before_name='<mark>{"n": "',
        before_arguments='", "a": ',
        after_arguments="}</mark>",
        markers=("<mark>", "</mark>"),
    )
    row = matcher(None, calls_of(syntax), special=syntax.markers)

    assert allowed(row) == [IDS["<mark>"]]
    assert takes(row, written("any", "{}", syntax))


def test_an_answer_or_calls() -> None:
    """Tools on auto beside a schema: the model may do either, after thinking."""

    def is_taken(text: str) -> bool:
        return takes(matcher(JsonSchema(text=PERSON), calls_of(), THINK), text)

    assert is_taken('<think>x</think>{"name":"ok"}')
    assert is_taken("<think>x</think>\n" + written("any", "{}"))
    assert is_taken(written("any", "{}"))
    assert not is_taken("<think>x</think>hello")


def test_arguments_keep_to_what_can_be_said() -> None:
    """A tool's schema that no grammar can say in full still gives a call: that is what is promised."""
    tool = Tool(name="odd", parameters={"properties": {"a": {"type": "integer", "not": {"const": 3}}}})

    assert takes(matcher(None, calls_of(tools=(tool,))), written("odd", '{"a": 4}'))
    assert not takes(matcher(None, calls_of(tools=(tool,))), written("odd", '{"a": "x"}'))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"$ref": "https://example.com/schema.json"},
        {"properties": {"a": {"enum": ["x" * 1000 + str(i) for i in range(300)]}}},
    ],
)
def test_tools_that_cannot_be_called_are_refused(parameters: dict[str, Any]) -> None:
    """Impossible, remote or enormous parameters."""
    with pytest.raises(GrammarRefused):
        matcher(None, calls_of(tools=(Tool(name="odd", parameters=parameters),)))


# --- matchers -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_whatever_is_drawn_keeps_to_the_schema(random: Any) -> None:
    """Draws of any allowed token end in JSON of the schema, and never beside the vocabulary."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "count": {"type": "integer", "minimum": -20, "maximum": 300},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
            "at": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "boolean"}}}]},
        },
        "required": ["kind", "tags"],
        "additionalProperties": False,
    }
    schema["properties"]["at"]["anyOf"][1]["additionalProperties"] = False
    row = matcher(JsonSchema(text=json.dumps(schema)))
    drawn: list[int] = []
    while True:
        token = random.choice(allowed(row))
        assert token < len(IDS)
        row.consume(token)
        if token == IDS[END]:
            break
        drawn.append(token)
        assert len(drawn) < 300

    Draft202012Validator(schema).validate(json.loads(TOKENIZER.decode(drawn)))
    assert allowed(row) == [IDS[END]]


def test_a_lost_row_can_only_end() -> None:
    """A token that the grammar forbids (a fault of ours) loses it: from then on the end is forced."""
    row = matcher(JsonObject())
    row.consume(IDS["a"])

    assert allowed(row) == [IDS[END]]
    row.consume(IDS[END])
    assert allowed(row) == [IDS[END]]


def test_rows_of_one_grammar_are_their_own() -> None:
    """Compiled once, drawn by many."""
    first, second = matcher(OneOf(options=("ab", "cd"))), matcher(OneOf(options=("ab", "cd")))
    first.consume(IDS["a"])

    assert allowed(first) == [IDS["b"]]
    assert allowed(second) == sorted([IDS["a"], IDS["c"]])


def test_a_slow_tokenizer_is_not_supported() -> None:
    """It says so, and that nothing can be compiled is known before."""
    slow = GrammarCompiler(object(), WIDTH, [1])

    assert not slow.is_usable
    assert COMPILER.is_usable
    with pytest.raises(TokenizerUnsupported):
        slow.compile(grammar(JsonObject(), None, None, {}))


def test_a_model_without_an_end_is_not_supported() -> None:
    """A finished answer could never end."""
    endless = GrammarCompiler(TOKENIZER, WIDTH, [WIDTH + 4])

    assert not endless.is_usable
    with pytest.raises(TokenizerUnsupported):
        endless.compile(grammar(JsonObject(), None, None, {}))


@given(st.text(alphabet='ab"\\\n<>[]é ', max_size=20))
def test_texts_are_spelled_as_they_are(text: str) -> None:
    """Markers by id, all else quoted, nothing lost."""
    pieces = spelled(text.replace(" ", ""), {"<a>": 5, "[a": 6}).split()
    read = "".join({"<[5]>": "<a>", "<[6]>": "[a"}.get(piece) or json.loads(piece) for piece in pieces)

    assert read == text.replace(" ", "")
