"""Requests become commands: nothing is lost on the way, and what cannot be honoured names its field."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.decode import decode
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.openai.thinking import UNBOUNDED
from gateway.openai.translate import chat_to_generate, completion_to_generate
from gateway.request_body import Decoded
from protocol.failures import Failure, FailureKind
from protocol.framing import Codec
from protocol.generation import (
    CacheUse,
    ChatMessage,
    ChatPrompt,
    Generate,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    WorkerCommand,
    WorkerEvent,
)
from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.scopes import owner_id

ID = RequestId("req_1")
SCOPE = b"scope of alice"
USER = {"role": "user", "content": "hi"}


def chat(*messages: Any, **fields: Any) -> Generate | Failure:
    body = {"model": "m", "messages": list(messages) or [USER], **fields}
    decoded = decode(json.dumps(body).encode(), ChatRequest)
    if isinstance(decoded, Failure):
        return decoded
    return only(chat_to_generate(decoded.request, request_id=ID, cache_scope=SCOPE))


def completion(prompt: Any, **fields: Any) -> Generate | Failure:
    decoded = decode(json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), CompletionRequest)
    if isinstance(decoded, Failure):
        return decoded
    return only(completion_to_generate(decoded.request, request_id=ID, cache_scope=SCOPE))


def only(translated: tuple[Generate, ...] | Failure) -> Generate | Failure:
    """The command of a request for one choice."""
    if isinstance(translated, Failure):
        return translated
    (generate,) = translated
    return generate


def good(generate: Generate | Failure) -> Generate:
    assert isinstance(generate, Generate), generate
    return generate


def messages_of(generate: Generate | Failure) -> tuple[ChatMessage, ...]:
    prompt = good(generate).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


# --- options ---------------------------------------------------------------------------------------------------------


def test_every_honoured_option_reaches_the_worker() -> None:
    """Nothing that the worker can do is lost, and the defaults are OpenAI's."""
    generate = good(
        chat(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            repetition_penalty=1.1,
            logit_bias={"5": -100, "7": 3.5},
            seed=9,
            max_tokens=11,
            stop=["a", "b"],
            stop_token_ids=[2],
            logprobs=True,
            top_logprobs=3,
            chat_template_kwargs={"enable_thinking": False},
            ignore_eos=True,
        )
    )
    assert generate == Generate(
        request_id=ID,
        prompt=ChatPrompt(
            messages=(ChatMessage(role="user", content="hi"),), template_arguments={"enable_thinking": False}
        ),
        sampling=Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            repetition_penalty=1.1,
            logit_bias={5: -100.0, 7: 3.5},
            seed=9,
        ),
        max_tokens=11,
        stop=("a", "b"),
        stop_token_ids=(2,),
        top_logprobs=3,
        cache=CacheUse(scope=SCOPE, owner=owner_id(SCOPE)),
        reasoning="split",
        ignore_end="yes",
    )
    plain = good(chat())
    assert (plain.sampling, plain.max_tokens, plain.stop, plain.top_logprobs) == (Sampling(), None, (), None)
    assert (plain.ignore_end, good(completion("x")).reasoning) == ("no", "keep")


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 10**30}, 2**31 - 1),
    ],
)
def test_max_tokens(fields: dict[str, Any], max_tokens: int | None) -> None:
    """C01: the newer name wins, and a huge number is left to the context's end."""
    assert good(chat(**fields)).max_tokens == max_tokens


@pytest.mark.parametrize(("seed", "drawn"), [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (None, None)])
def test_any_64_bit_seed_is_taken(seed: int | None, drawn: int | None) -> None:
    """A negative seed is mapped, so that it is as good as any other."""
    assert good(chat(seed=seed)).sampling.seed == drawn


@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_top_k_off(top_k: int | None) -> None:
    """Both spellings of "off" mean 0."""
    assert good(chat(top_k=top_k)).sampling.top_k == 0


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ([], ()), ("x", ("x",)), (["a", "b", "c", "d"], ("a", "b", "c", "d"))]
)
def test_stop_strings(stop: Any, strings: tuple[str, ...]) -> None:
    """B02: a string or up to four."""
    assert good(chat(stop=stop)).stop == strings
    assert good(completion("x", stop=stop)).stop == strings


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        ({"n": 33}, "n", FailureKind.INVALID_REQUEST),
        ({"best_of": 2}, "best_of", FailureKind.UNSUPPORTED),
        ({"audio": {"voice": "x"}}, "audio", FailureKind.UNSUPPORTED),
        ({"response_format": {"type": "poem"}}, "response_format.type", FailureKind.UNSUPPORTED),
        ({"modalities": ["text", "audio"]}, "modalities", FailureKind.UNSUPPORTED),
        ({"stream_options": {"include_usage": True}}, "stream_options", FailureKind.INVALID_REQUEST),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", FailureKind.INVALID_REQUEST),
        ({"stop": [""]}, "stop", FailureKind.INVALID_REQUEST),
        ({"stop": ""}, "stop", FailureKind.INVALID_REQUEST),
        ({"seed": 2**64}, "seed", FailureKind.INVALID_REQUEST),
        ({"logit_bias": {"five": 1}}, "logit_bias", FailureKind.INVALID_REQUEST),
        ({"logit_bias": {"-5": 1}}, "logit_bias", FailureKind.INVALID_REQUEST),
    ],
)
def test_what_cannot_be_honoured_is_refused_on_both_routes(
    fields: dict[str, Any], param: str, kind: FailureKind
) -> None:
    """C02, C12, B02: never silently one choice, no tools, no format: the field is named, on every route alike."""
    for failure in (chat(**fields), completion("x", **fields)):
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.param) == (kind, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"best_of": 1},
        {"echo": False},
        {"suffix": ""},
        {"ignore_eos": False},
        {"functions": []},
        {"grammar": ""},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
        {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": True}},
        {"store": True, "metadata": {}, "prediction": {"type": "content", "content": "x"}, "verbosity": "low"},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    """Values that ask for what happens anyway are no reason to refuse."""
    assert good(chat(**fields)) == good(chat())
    assert good(completion("x", **fields)) == good(completion("x"))


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}])
def test_top_logprobs_needs_logprobs(fields: dict[str, Any]) -> None:
    """As OpenAI has it."""
    failure = chat(**fields)
    assert isinstance(failure, Failure)
    assert failure.param == "top_logprobs"


def test_logprobs() -> None:
    """`logprobs: true` alone asks for the drawn tokens'; the legacy route counts alternatives, 0 included."""
    assert good(chat(logprobs=True)).top_logprobs == 0
    assert good(chat(logprobs=False)).top_logprobs is None
    assert good(completion("x", logprobs=0)).top_logprobs == 0
    assert good(completion("x", logprobs=5)).top_logprobs == 5
    assert good(completion("x")).top_logprobs is None


def test_a_salt_narrows_the_callers_own_scope() -> None:
    """Equal salts meet, others do not, and no salt reaches another caller's scope or the unsalted one."""
    decoded = decode(b'{"model":"m","messages":[{"role":"user","content":"x"}],"cache_salt":"s"}', ChatRequest)
    assert isinstance(decoded, Decoded)
    of_bob = good(only(chat_to_generate(decoded.request, request_id=ID, cache_scope=b"scope of bob")))
    scopes = [good(chat(cache_salt=salt)).cache.scope for salt in ("s", "s", "t")]
    assert scopes[0] == scopes[1]
    assert len({*scopes, SCOPE, of_bob.cache.scope}) == 4


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_of_any_role_are_joined_in_order(role: str) -> None:
    """C03: nothing is lost and nothing is put in between."""
    parts = [{"type": "text", "text": "SC"}, {"type": "text", "text": "04", "cache_control": {"type": "ephemeral"}}]
    (message,) = messages_of(chat({"role": role, "content": parts, "tool_call_id": "c1"}))
    assert (message.role, message.content) == (role, "SC04")


def test_roles_stand_where_they_stood() -> None:
    """C04, C05: system messages in the middle and developer messages are kept in place, for the template to decide."""
    texts = [("developer", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("system", "e"), ("user", "f")]
    messages = messages_of(chat(*({"role": role, "content": text} for role, text in texts)))
    assert [(message.role, message.content) for message in messages] == texts


@pytest.mark.parametrize(
    ("message", "param", "kind"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role", FailureKind.INVALID_REQUEST),
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].name", FailureKind.INVALID_REQUEST),
        ({"role": "assistant", "content": None}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "assistant"}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "user", "content": None}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "user"}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "user", "content": []}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "system"}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "tool", "tool_call_id": "c"}, "messages[0].content", FailureKind.INVALID_REQUEST),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id", FailureKind.INVALID_REQUEST),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[0].content[0].text",
            FailureKind.INVALID_REQUEST,
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "poem"}]},
            "messages[0].content[1].type",
            FailureKind.INVALID_REQUEST,
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]},
            "messages[0].content[0]",
            FailureKind.UNSUPPORTED,
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[0].content[0]",
            FailureKind.UNSUPPORTED,
        ),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[0].content[0]", FailureKind.UNSUPPORTED),
        (
            {"role": "assistant", "content": "x", "audio": {"id": "a"}},
            "messages[0].audio",
            FailureKind.UNSUPPORTED,
        ),
    ],
)
def test_a_wrong_message_is_named(message: dict[str, Any], param: str, kind: FailureKind) -> None:
    """C03, C05, C07, C08: the path points at the message and the part; pictures are refused, never fetched."""
    failure = chat(message)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (kind, param)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "function_call": {"name": "f"}},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "", "refusal": None},
        {"role": "system", "content": []},
    ],
)
def test_absent_content_is_empty_text(message: dict[str, Any]) -> None:
    """C07: never the word None."""
    assert messages_of(chat(message, USER))[0].content == ""


def test_an_assistants_message_keeps_what_it_had() -> None:
    """Reasoning under either name, refusals and names are kept."""
    messages = messages_of(
        chat(
            {"role": "assistant", "content": "a", "reasoning_content": "because", "name": "bot"},
            {"role": "assistant", "content": "b", "reasoning": "since"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": None, "refusal": "never"},
        )
    )
    assert [message.reasoning_content for message in messages] == ["because", "since", None, None]
    assert [message.content for message in messages] == ["a", "b", "no", "never"]
    assert messages[0].name == "bot"


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("arguments", "decoded"),
    [
        ('{"city":"Oslo"}', {"city": "Oslo"}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ('{"deep":{"list":[1,2.5,null,"x"]}}', {"deep": {"list": [1, 2.5, None, "x"]}}),
        (" ", {}),
        ("{", {"_raw": "{"}),
        ("[]", {"_raw": "[]"}),
        ("nonsense", {"_raw": "nonsense"}),
        ('{"a":1' + "0" * 30 + "}", {"_raw": '{"a":1' + "0" * 30 + "}"}),
        ('{"a":' * 100 + "1" + "}" * 100, {"_raw": '{"a":' * 100 + "1" + "}" * 100}),
    ],
)
def test_the_arguments_of_earlier_calls_are_decoded(arguments: Any, decoded: dict[str, Any]) -> None:
    """A08: templates want a mapping, the API has a string, models leave it empty or write it wrong: a conversation in
    which one did goes on, and the template sees what was written."""
    messages = messages_of(chat(USER, calling(arguments), {"role": "tool", "tool_call_id": "c1", "content": "rain"}))
    assert messages[1].tool_calls == (ToolCall(id="c1", name="get_weather", arguments=decoded),)
    assert messages[1].content == ""
    assert messages[2].tool_call_id == "c1"


@pytest.mark.parametrize("arguments", [{"a": 10**30}, {"a": [{}] * 3 + [{"b": 2**64}]}])
def test_an_object_that_cannot_travel_names_its_call(arguments: dict[str, Any]) -> None:
    """A client that sends the object itself can mend it: a 400 that points at the call."""
    failure = chat(USER, calling(arguments))
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert failure.param == "messages[1].tool_calls[0].function.arguments"


def test_the_legacy_roles_are_calls_and_their_answers() -> None:
    """`function_call` and the role `function` become a call and a tool's message that answers the last one of its
    name."""
    calls = [{"role": "assistant", "function_call": {"name": name, "arguments": '{"a": 1}'}} for name in ("f", "g")]
    messages = messages_of(chat(USER, *calls, {"role": "function", "name": "f", "content": "done"}))
    assert messages[1].tool_calls == (ToolCall(id="call_messages[1]", name="f", arguments={"a": 1}),)
    assert messages[3] == ChatMessage(role="tool", name="f", content="done", tool_call_id="call_messages[1]")


@pytest.mark.parametrize(("kind", "shown"), [("image_url", "image"), ("input_audio", "audio"), ("file", "file")])
def test_a_tools_picture_is_named_in_its_place(kind: str, shown: str) -> None:
    """C08: what a tool gave cannot be taken back, so the model reads that something was there; no data gets in."""
    parts = [{"type": "text", "text": "see "}, {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}]
    (_, message) = messages_of(chat(calling("{}"), {"role": "tool", "tool_call_id": "c1", "content": parts}))
    assert message.content == f"see [{shown}: left out, since this model reads text only]"


# --- what a template is told -----------------------------------------------------------------------------------------


def template_arguments(**fields: Any) -> dict[str, Any]:
    prompt = good(chat(**fields)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.template_arguments


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
            {"reasoning_effort": "none", "enable_thinking": True, "x": 1},
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
            {"reasoning_effort": "low"},
        ),
        ({"reasoning_budget": 0}, {"enable_thinking": False}),
        ({"reasoning_budget": 1}, {}),
        (
            {"chat_template_kwargs": {"thinking_budget": 0, "enable_thinking": True}},
            {"thinking_budget": 0, "enable_thinking": True},
        ),
    ],
)
def test_reasoning_effort_reaches_the_template(fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    """D03: "none" switches thinking off in templates that know only that; what the client says itself goes before."""
    assert template_arguments(**fields) == arguments


BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget")


@pytest.mark.parametrize("field", BUDGETS)
def test_a_budget_has_many_names(field: str) -> None:
    """Numbers as they are, 0 too; -1 is no bound, and says so against a profile; what says nothing is None."""
    assert good(chat(**{field: 0})).reasoning_budget_tokens == 0
    assert good(chat(**{field: 7})).reasoning_budget_tokens == 7
    assert good(chat(**{field: 2**40})).reasoning_budget_tokens == UNBOUNDED
    assert good(chat(**{field: -1})).reasoning_budget_tokens == UNBOUNDED
    assert good(chat(**{field: None})).reasoning_budget_tokens is None
    assert param_of(chat(**{field: -2})) == field


@pytest.mark.parametrize("value", ["7", 1.5, True, -2, [1]])
def test_a_templates_budget_is_a_number(value: Any) -> None:
    """It would be held to; what cannot be is refused by its whole name."""
    assert param_of(chat(chat_template_kwargs={"thinking_budget": value})) == "chat_template_kwargs.thinking_budget"
    assert good(chat(chat_template_kwargs={"thinking_budget": 7})).reasoning_budget_tokens == 7


def test_two_budgets_must_agree() -> None:
    """The same twice is fine."""
    assert good(chat(thinking_budget=7, chat_template_kwargs={"thinking_budget": 7})).reasoning_budget_tokens == 7
    assert param_of(chat(thinking_budget=7, reasoning_budget=8)) == "thinking_budget"


def param_of(refused: Generate | Failure) -> str | None:
    assert isinstance(refused, Failure)
    return refused.param


ASSISTANT = {"role": "assistant", "content": "The capital is"}


def test_an_answer_goes_on_only_when_told() -> None:
    """C06: OpenAI's API begins a new message after an assistant's; vLLM's flag goes on from its text."""
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    for fields, ending in (({}, "new_message"), ({"continue_final_message": True}, "continue"), (flags, "continue")):
        prompt = good(chat(USER, ASSISTANT, **fields)).prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.ending == ending


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER], {"continue_final_message": True}, "continue_final_message"),
        ([USER, {**ASSISTANT, "content": ""}], {"continue_final_message": True}, "continue_final_message"),
        (
            [USER, {**ASSISTANT, "function_call": {"name": "f"}}],
            {"continue_final_message": True},
            "continue_final_message",
        ),
        ([USER, ASSISTANT], {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ([USER, ASSISTANT], {"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_go_on_is_refused(messages: list[Any], fields: dict[str, Any], param: str) -> None:
    """C06: there must be a text to go on from, and the two flags must not contradict each other."""
    failure = chat(*messages, **fields)
    assert isinstance(failure, Failure)
    assert failure.param == param


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "translated"),
    [
        ("abc", TextPrompt(text="abc")),
        ("", TextPrompt(text="")),
        (["abc"], TextPrompt(text="abc")),
        ([1, 2, 3], TokenPrompt(token_ids=(1, 2, 3))),
        ([[1, 2, 3]], TokenPrompt(token_ids=(1, 2, 3))),
        ([7], TokenPrompt(token_ids=(7,))),
    ],
)
def test_each_form_of_prompt(prompt: Any, translated: Prompt) -> None:
    """Text, tokens, or one of them in a list."""
    generate = good(completion(prompt))
    assert generate.prompt == translated
    assert generate.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "param", "kind"),
    [
        (["a", 1], "prompt[1]", FailureKind.INVALID_REQUEST),
        ([[1], [2], []], "prompt[2]", FailureKind.INVALID_REQUEST),
        (["x"] * 65, "prompt", FailureKind.INVALID_REQUEST),
        ([], "prompt", FailureKind.INVALID_REQUEST),
        ([[]], "prompt[0]", FailureKind.INVALID_REQUEST),
        (None, "prompt", FailureKind.INVALID_REQUEST),
        (5, "prompt", FailureKind.INVALID_REQUEST),
        ([-1], "prompt[0]", FailureKind.INVALID_REQUEST),
        ([True], "prompt[0]", FailureKind.INVALID_REQUEST),
    ],
)
def test_a_wrong_prompt_is_named(prompt: Any, param: str, kind: FailureKind) -> None:
    """No mixture of ids and texts, nothing empty, and not more than a bounded number of answers."""
    failure = completion(prompt)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (kind, param)


def completions(prompt: Any, **fields: Any) -> tuple[Generate, ...]:
    decoded = decode(json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), CompletionRequest)
    assert isinstance(decoded, Decoded), decoded
    translated = completion_to_generate(decoded.request, request_id=ID, cache_scope=SCOPE)
    assert isinstance(translated, tuple), translated
    return translated


def test_several_prompts_have_n_answers_each() -> None:
    """As OpenAI orders them: prompt by prompt; ids and seeds differ within a prompt, and the prompt is one object."""
    work = completions(["a", [1, 2]], n=2, seed=7)
    assert [command.prompt for command in work] == [TextPrompt(text="a")] * 2 + [TokenPrompt(token_ids=(1, 2))] * 2
    assert [command.request_id for command in work] == ["req_1", "req_1-1", "req_1-2", "req_1-3"]
    assert [command.sampling.seed for command in work] == [7, 8, 7, 8]
    assert work[0].prompt is work[1].prompt
    assert len(completions(["x"] * 2, n=32)) == 64


def test_a_suffix_goes_with_each_prompt() -> None:
    """FIM: the worker knows how its model wants to be asked."""
    assert [command.prompt for command in completions(["a", "b"], suffix="end")] == [
        TextPrompt(text="a", suffix="end"),
        TextPrompt(text="b", suffix="end"),
    ]


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([1, 2], {"suffix": "x"}, "suffix"),
        (["a", [1]], {"suffix": "x"}, "suffix"),
        ([1, 2], {"echo": True}, "echo"),
        ("a", {"echo": True, "logprobs": 0}, "echo"),
    ],
)
def test_what_needs_text_names_itself(prompt: Any, fields: dict[str, Any], param: str) -> None:
    """The gateway has no tokenizer and the worker no logprobs of a prompt."""
    failure = completion(prompt, **fields)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (FailureKind.UNSUPPORTED, param)


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_no_tools_on_the_legacy_route(name: str) -> None:
    """C12: ignoring them would be a lie; an empty list asks for nothing."""
    failure = completion("x", **{name: [{"type": "function", "name": "f", "function": {"name": "f"}}]})
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (FailureKind.UNSUPPORTED, name)
    assert good(completion("x", **{name: []})) == good(completion("x"))
    assert isinstance(completion("x", tool_choice="required"), Failure)


# --- properties ------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


OBJECT = st.dictionaries(st.text(max_size=8), JSON | st.integers(min_value=2**63), max_size=4)


@given(OBJECT, st.text() | JSON, OBJECT | JSON)
def test_what_is_accepted_can_travel_to_the_worker(kwargs: dict[str, Any], content: Any, arguments: Any) -> None:
    """Whatever a client sends: a Failure, or a command that survives the wire as it is."""
    generate = chat(
        {"role": "user", "content": content},
        calling(arguments),
        calling(json.dumps(arguments)),
        chat_template_kwargs=kwargs,
    )
    if isinstance(generate, Generate):
        encoded = Codec[WorkerEvent, WorkerCommand](WorkerEvent).encode(generate)
        assert msgspec.msgpack.decode(encoded, type=WorkerCommand) == generate
