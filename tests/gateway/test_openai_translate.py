"""Requests become commands: nothing is lost on the way, and what cannot be honoured names its field."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.decode import Decoded, decode
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.openai.translate import chat_to_generate, completion_to_generate
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
    )
    plain = good(chat())
    assert (plain.sampling, plain.max_tokens, plain.stop, plain.top_logprobs) == (Sampling(), None, (), None)


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
        ({"echo": True}, "echo", FailureKind.UNSUPPORTED),
        ({"suffix": "end"}, "suffix", FailureKind.UNSUPPORTED),
        ({"ignore_eos": True}, "ignore_eos", FailureKind.UNSUPPORTED),
        ({"tools": [{"type": "function"}]}, "tools", FailureKind.UNSUPPORTED),
        ({"tool_choice": "required"}, "tool_choice", FailureKind.UNSUPPORTED),
        ({"tool_choice": "sometimes"}, "tool_choice", FailureKind.UNSUPPORTED),
        ({"tool_choice": {"type": "function"}}, "tool_choice", FailureKind.UNSUPPORTED),
        ({"functions": [{"name": "f"}]}, "functions", FailureKind.UNSUPPORTED),
        ({"function_call": {"name": "f"}}, "function_call", FailureKind.UNSUPPORTED),
        ({"response_format": {"type": "json_object"}}, "response_format", FailureKind.UNSUPPORTED),
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
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].role", FailureKind.UNSUPPORTED),
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
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            "messages[0].function_call",
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
        {"role": "assistant", "content": None},
        {"role": "assistant"},
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
    ],
)
def test_the_arguments_of_earlier_calls_are_decoded(arguments: Any, decoded: dict[str, Any]) -> None:
    """A08: templates want a mapping, the API has a string, models leave it empty."""
    messages = messages_of(chat(USER, calling(arguments), {"role": "tool", "tool_call_id": "c1", "content": "rain"}))
    assert messages[1].tool_calls == (ToolCall(id="c1", name="get_weather", arguments=decoded),)
    assert messages[1].content == ""
    assert messages[2].tool_call_id == "c1"


@pytest.mark.parametrize(
    "arguments", ["{", "[]", "5", "nonsense", '{"a":1' + "0" * 30 + "}", '{"a":' * 100 + "1" + "}" * 100]
)
def test_undecodable_arguments_name_their_call(arguments: str) -> None:
    """A08: a 400 that points at the call, never another prompt than the client meant."""
    failure = chat(USER, calling(arguments))
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert failure.param == "messages[1].tool_calls[0].function.arguments"


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "translated"),
    [
        ("abc", TextPrompt(text="abc")),
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
        (["a", "b"], "prompt", FailureKind.UNSUPPORTED),
        ([[1], [2]], "prompt", FailureKind.UNSUPPORTED),
        ([], "prompt", FailureKind.INVALID_REQUEST),
        ([[]], "prompt[0]", FailureKind.INVALID_REQUEST),
        (None, "prompt", FailureKind.INVALID_REQUEST),
        (5, "prompt", FailureKind.INVALID_REQUEST),
        ([-1], "prompt[0]", FailureKind.INVALID_REQUEST),
        ([True], "prompt[0]", FailureKind.INVALID_REQUEST),
    ],
)
def test_a_wrong_prompt_is_named(prompt: Any, param: str, kind: FailureKind) -> None:
    """Several prompts in one request are not supported; the rest is a mistake."""
    failure = completion(prompt)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (kind, param)


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
