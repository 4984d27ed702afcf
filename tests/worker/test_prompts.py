"""Messages → tokens: nothing lost, nothing twice, and refusals that say what to change."""

import queue
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from protocol.failures import FailureKind
from protocol.generation import ChatMessage, ChatPrompt, Check, Checked, Generate, TextPrompt, TokenPrompt, ToolCall
from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.tools import Tool
from worker.answers import call_syntax
from worker.answers.call_syntax import HERMES
from worker.conversations import fold_system_messages
from worker.prompts import (
    RESERVED_TEMPLATE_ARGUMENTS,
    PromptRefused,
    prompt_tokens,
    render_chat,
    resolve_max_tokens,
)
from worker.text_plane import LoadedWeights, TextPlane
from worker.tokenizing import TokenQuestions


def says(role: Any, content: str, **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **more)


def chat(*messages: ChatMessage, **arguments: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages, template_arguments=arguments)


class TemplateOnly:
    """A tokenizer whose chat template is a Python function of the messages."""

    has_chat_template = True

    def __init__(self, template: Callable[[list[dict[str, Any]]], str], source: str = "") -> None:
        self._template = template
        self.chat_template = source

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        return self._template(conversation)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return list(text.encode())

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [chr(token) for token in ids]

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


def lines(conversation: list[dict[str, Any]]) -> str:
    return "".join(f"[{message['role']}]{message['content']}\n" for message in conversation)


def without_system(conversation: list[dict[str, Any]]) -> str:
    """Drops system messages after the first, as some templates do."""
    return lines([m for i, m in enumerate(conversation) if i == 0 or m["role"] != "system"])


@pytest.fixture(scope="module")
def script(script_model: Path) -> Any:
    from worker.mlx_model import load_tokenizer

    return load_tokenizer(script_model)


def refusal(act: Callable[[], object]) -> PromptRefused:
    with pytest.raises(PromptRefused) as caught:
        act()
    return caught.value


# --- system messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [says("user", "one"), says("assistant", "two"), says("system", "NOTE"), says("user", "three")],
        [says("system", "first"), says("system", "NOTE"), says("user", "three")],
        [says("user", "one"), says("assistant", "two"), says("user", "three"), says("system", "NOTE")],
        [says("user", "three"), says("developer", "NOTE")],
        [says("system", "first"), says("user", "three"), says("system", "NOTE"), says("assistant", "a")],
    ],
)
@pytest.mark.parametrize("tokenizer", ["raises", "drops"])
def test_a_system_message_anywhere(script: Any, tokenizer: str, messages: list[ChatMessage]) -> None:
    """C04: whether the template raises on it or drops it, the instruction is in the prompt exactly once."""
    text = render_chat(script if tokenizer == "raises" else TemplateOnly(without_system), chat(*messages)).text

    assert text.count("NOTE") == 1
    for message in messages:
        assert text.count(message.content) >= 1


def test_folding_leaves_earlier_turns_as_they_were(script: Any) -> None:
    """K08: a note in a later turn must not change the prefix that is cached already."""
    history = [says("system", "be brief"), says("user", "one"), says("assistant", "two")]
    before = render_chat(script, chat(*history, says("user", "x"))).text
    after = render_chat(script, chat(*history, says("system", "NOTE"), says("user", "three"))).text

    shared = before[: before.index("x<|im_end|>")]
    assert after.startswith(shared)


def test_a_template_that_takes_them_gets_them_as_they_are() -> None:
    """Folding is a way out, not the rule."""
    messages = [says("user", "one"), says("system", "NOTE"), says("user", "two")]

    assert render_chat(TemplateOnly(lines), chat(*messages)).text == "[user]one\n[system]NOTE\n[user]two\n"


def test_a_template_that_takes_no_system_at_all_is_an_answer_not_a_loss() -> None:
    """A dropped instruction is refused, with the message's place."""

    def no_system(conversation: list[dict[str, Any]]) -> str:
        return lines([m for m in conversation if m["role"] != "system"])

    why = refusal(lambda: render_chat(TemplateOnly(no_system), chat(says("system", "NOTE"), says("user", "x"))))

    assert why.failure.kind is FailureKind.INVALID_REQUEST
    assert "messages[0]" in why.failure.message
    assert "NOTE" not in why.failure.message


ROLES = st.sampled_from(["system", "developer", "user", "assistant"])


@given(st.lists(ROLES, min_size=1, max_size=8))
def test_folding_loses_nothing(roles: list[Any]) -> None:
    """Every text once, in order; afterwards only the first message is a system message."""
    messages = [says(role, f"<{i}>") for i, role in enumerate(roles)]

    folded = fold_system_messages(messages)

    everything = "".join(message.content for message in folded)
    assert all(everything.count(message.content) == 1 for message in messages)
    assert not any(message.role in ("system", "developer") for message in folded[1:])
    turns = [message.content for message in messages if message.role in ("user", "assistant")]
    assert [everything.index(turn) for turn in turns] == sorted(everything.index(turn) for turn in turns)


# --- roles, contents, tool calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "role"), [("... 'developer' ...", "developer"), ("...", "system")])
def test_developer_is_system_unless_the_template_knows_it(source: str, role: str) -> None:
    """C05."""
    text = render_chat(TemplateOnly(lines, source), chat(says("developer", "be brief"), says("user", "x"))).text

    assert text.startswith(f"[{role}]be brief")


def test_a_call_without_text_renders_as_empty_text(script: Any) -> None:
    """C07, A08: never the word None; arguments reach the template as a mapping."""
    call = ToolCall(id="c1", name="get_weather", arguments={"city": "Oslo"})
    text = render_chat(
        script,
        chat(
            says("user", "weather?"),
            says("assistant", "", tool_calls=(call,)),
            says("tool", "12 degrees", tool_call_id="c1"),
            says("user", "SC04"),
        ),
    ).text

    assert "None" not in text
    assert '"city": "Oslo"' in text
    assert "<|im_start|>tool\n12 degrees" in text
    assert text.endswith("<|SC04|>")


def test_only_fields_that_are_there_reach_the_template() -> None:
    """A template asks `is defined`; a null would be an answer."""
    seen: list[dict[str, Any]] = []

    def keep(conversation: list[dict[str, Any]]) -> str:
        seen.extend(conversation)
        return "x"

    render_chat(TemplateOnly(keep), chat(says("user", "a"), says("user", "b", name="Bo", reasoning_content="hm")))

    assert seen == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b", "name": "Bo", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize("wrong", [TypeError("x"), KeyError("k"), AttributeError("items"), IndexError("i")])
def test_whatever_a_template_raises_is_the_requests_failure(wrong: Exception) -> None:
    """A template is the model author's code: its exceptions are 400s, not a worker's end."""

    def raising(_: list[dict[str, Any]]) -> str:
        raise wrong

    why = refusal(lambda: render_chat(TemplateOnly(raising), chat(says("user", "x"))))

    assert why.failure.kind is FailureKind.INVALID_REQUEST
    assert why.failure.param == "messages"


@pytest.mark.parametrize("name", sorted(RESERVED_TEMPLATE_ARGUMENTS))
def test_arguments_that_would_replace_the_request_are_refused(script: Any, name: str) -> None:
    """`chat_template_kwargs` may not smuggle in another conversation, template or output."""
    why = refusal(lambda: render_chat(script, chat(says("user", "x"), **{name: 1})))

    assert name in why.failure.message
    assert why.failure.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["self", "no_such_thing", "enable_thinking"])
def test_other_arguments_never_crash(script: Any, name: str) -> None:
    """Known or not, they end in a prompt or in a refusal."""
    try:
        text = render_chat(script, chat(says("user", "SC04"), **{name: "x"})).text
    except PromptRefused:
        return
    assert text.endswith("<|SC04|>")


def test_a_model_without_a_template_says_so() -> None:
    """And names the route that needs none."""
    tokenizer = TemplateOnly(lines)
    tokenizer.has_chat_template = False  # pyright: ignore

    assert "/v1/completions" in refusal(lambda: render_chat(tokenizer, chat(says("user", "x")))).failure.message


# --- tools ----------------------------------------------------------------------------------------------------------

WEATHER = Tool(
    name="get_weather",
    description="The weather",
    parameters={"type": "object", "properties": {"zone": {"type": "string"}, "city": {"type": "string"}}},
)
TIME = Tool(name="get_time")
CALL = ToolCall(id="call_0123456789abcdef01234567", name="get_weather", arguments={"city": "Oslo"})
CALLED = (
    says("user", "weather?"),
    says("assistant", "", tool_calls=(CALL,)),
    says("tool", "12 degrees", tool_call_id=CALL.id),
)


def with_tools(*messages: ChatMessage, **more: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages or (says("user", "SC04"),), tools=(WEATHER, TIME), **more)


class Jinja:
    """A tokenizer with this chat template, rendered as transformers does."""

    has_chat_template = True

    def __init__(self, source: str) -> None:
        self.chat_template = source
        self.seen: list[dict[str, Any]] = []

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        self.seen.append(kwargs)
        environment = jinja2.Environment(autoescape=False)  # noqa: S701 - prompts are no web pages
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self.chat_template).render(messages=conversation, **kwargs)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return list(text.encode())


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def test_tools_reach_the_template_in_the_clients_order(script: Any) -> None:
    """As OpenAI's tools, keys in the order in which they came, the same bytes every time: a prefix depends on it."""
    rendered = render_chat(script, with_tools(), syntax=HERMES)

    assert rendered.told_by == "template"
    assert rendered.text == render_chat(script, with_tools(), syntax=HERMES).text
    assert rendered.text.index("get_weather") < rendered.text.index("get_time")
    assert rendered.text.index('"zone"') < rendered.text.index('"city"')
    assert '{"type": "function", "function": {"name": "get_weather", "description": "The weather"' in rendered.text


@pytest.mark.parametrize("source", ["", "{{ tools and '' }}"])
def test_a_template_that_knows_no_tools_is_told_of_them(source: str) -> None:
    """Also one that has the word and drops them."""
    rendered = render_chat(TemplateOnly(lines, source), with_tools(says("system", "be brief"), *CALLED), syntax=HERMES)

    assert rendered.told_by == "preamble"
    assert rendered.text.startswith("[system]be brief")
    assert rendered.text.index("get_weather") < rendered.text.index("get_time")
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in rendered.text
    assert "[user]<tool_response>\n12 degrees" in rendered.text


def test_a_template_whose_calls_nobody_can_read_is_not_left_to_tell(script: Any) -> None:
    """A model that is told by its template would call in a format that ends up as text."""
    assert render_chat(script, with_tools()).told_by == "preamble"


def test_tools_without_a_system_message() -> None:
    """Gemma 2 and its kin take none: then the tools stand before the first question."""

    def strict(conversation: list[dict[str, Any]]) -> str:
        if any(message["role"] not in ("user", "assistant") for message in conversation):
            raise jinja2.TemplateError("System role not supported")
        return lines(conversation)

    rendered = render_chat(TemplateOnly(strict), with_tools(*CALLED))

    assert rendered.text.startswith("[user]You can call functions.")
    assert "</tool_response>" in rendered.text


def test_calls_that_a_template_drops_are_text_of_the_models_own_kind() -> None:
    """Some render the tools and forget the calls: a model must see what it called, as it would write it."""
    source = "{{ tools }}\n{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    rendered = render_chat(Jinja(source), with_tools(*CALLED), syntax=call_syntax.MISTRAL_NAMED)

    assert rendered.told_by == "template"
    assert '[assistant][TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[tool]12 degrees' in rendered.text


def test_a_template_that_takes_one_call_a_message() -> None:
    """Llama 3 raises for more: then each call stands before its own result."""
    source = (
        _LOOP + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('only one') }}{% endif %}"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    calls = (CALL, ToolCall(id="2", name="get_time", arguments={}))
    messages = (
        says("user", "?"),
        says("assistant", "so", tool_calls=calls),
        says("tool", "noon", tool_call_id="2"),
        says("tool", "12 degrees", tool_call_id=CALL.id),
    )

    assert render_chat(Jinja(source), chat(*messages)).text == (
        '[user]?[assistant]get_weather{"city": "Oslo"}so[tool]12 degrees[assistant]get_time{}[tool]noon'
    )


_LOOP = "{% for m in messages %}[{{ m.role }}]"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # wants arguments as text
        (
            _LOOP + "{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
            "{{ m.content }}{% endfor %}",
            '[assistant]get_weather {"city": "Oslo"}[tool]',
        ),
        # prints whatever it gets: a mapping would come out as Python
        (
            _LOOP + "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
            "{{ m.content }}{% endfor %}",
            '[assistant]get_weather {"city": "Oslo"}[tool]',
        ),
        # asks for no content where there are calls
        (
            _LOOP + "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name }} "
            "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            '[assistant]get_weather {"city": "Oslo"}[tool]',
        ),
        # knows no calls at all
        (
            _LOOP + "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            '[assistant]<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>[user]',
        ),
    ],
)
def test_a_call_of_the_past_is_rendered_as_the_template_wants_it(source: str, expected: str) -> None:
    """A08: whatever it wants, the call is in the prompt, as JSON, and the word None is not."""
    text = render_chat(Jinja(source), chat(*CALLED)).text

    assert expected in text
    assert "None" not in text
    assert "12 degrees" in text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_the_past_has_the_name_that_the_template_wants(name: str) -> None:
    """A template that re-renders it must find it: the prefix of the next turn depends on it."""
    source = _LOOP + "{{ m." + name + " }}{{ m.content }}{% endfor %}"

    assert render_chat(Jinja(source), chat(says("assistant", "so", reasoning_content="why"))).text == "[assistant]whyso"


def test_reasoning_that_a_template_refuses_beside_text_goes() -> None:
    """gpt-oss takes either of them in a message that calls."""
    source = (
        _LOOP + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    message = says("assistant", "so", reasoning_content="why", tool_calls=(CALL,))

    assert render_chat(Jinja(source), chat(message)).text == "[assistant]get_weatherso"


def test_ids_are_short_where_a_template_wants_them_so() -> None:
    """Mistral's templates raise for any other: nine letters and digits, the same for the call and its result."""
    source = (
        _LOOP + "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}<{{ c.id }}>{% endfor %}"
        "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{{ m.content }}{% endfor %}"
    )
    text = render_chat(Jinja(source), chat(*CALLED)).text
    first, second = re.findall(r"<(\w+)>", text)

    assert first == second
    assert len(first) == 9
    kept = replace(CALL, id="aB3dE5gH7")
    assert "<aB3dE5gH7>" in render_chat(Jinja(source), chat(says("assistant", "", tool_calls=(kept,)))).text


# --- how a prompt ends ----------------------------------------------------------------------------------------------

THINKS = _LOOP + "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"


@pytest.mark.parametrize("content", ["x", "<think>", "</think>", "[assistant]<think>\n", "think"])
def test_what_the_template_puts_behind_the_last_message(content: str) -> None:
    """D01: not a word of it is the user's, whatever the user wrote."""
    assert render_chat(Jinja(THINKS), chat(says("user", content)), "wanted").tail == "[assistant]<think>\n"


def test_a_message_that_is_left_open(script: Any) -> None:
    """C06: the prompt ends in its text, without the white space that no token would begin with."""
    prompt = ChatPrompt(
        messages=(says("user", "capital?"), says("assistant", "The capital of France is ")), ending="continue"
    )
    text = render_chat(script, prompt).text

    assert text.endswith("<|im_start|>assistant\nThe capital of France is")


@pytest.mark.parametrize(
    "messages",
    [
        (says("user", "x"),),
        (says("user", "x"), says("assistant", "")),
        (says("user", "x"), says("assistant", "\n")),
    ],
)
def test_what_cannot_be_continued_is_refused(script: Any, messages: tuple[ChatMessage, ...]) -> None:
    """C06: with the field that is at fault."""
    why = refusal(lambda: render_chat(script, ChatPrompt(messages=messages, ending="continue")))

    assert why.failure.kind is FailureKind.INVALID_REQUEST
    assert why.failure.param == "messages"


def test_a_template_that_changes_the_last_message_cannot_continue_it() -> None:
    """Rather an error than another text."""
    source = _LOOP + "{{ m.content | upper }}{% endfor %}"
    prompt = ChatPrompt(messages=(says("user", "x"), says("assistant", "so")), ending="continue")

    assert "continued" in refusal(lambda: render_chat(Jinja(source), prompt)).failure.message


# --- tokens and limits ----------------------------------------------------------------------------------------------


def test_special_tokens_are_not_doubled(script: Any) -> None:
    """The template writes them; the tokenizer must not add them again."""
    token_ids = prompt_tokens(script, chat(says("user", "SC04")), 1024).token_ids

    assert script.decode(token_ids).count("<|im_start|>") == 2
    assert token_ids[-1] == script.convert_tokens_to_ids("<|SC04|>")


@pytest.mark.parametrize(("token_ids", "bad"), [((1, -1), -1), ((1024,), 1024), ((2**40,), 2**40)])
def test_a_token_outside_the_vocabulary_is_refused(token_ids: tuple[int, ...], bad: int) -> None:
    """An index out of range would read other memory on a GPU."""
    why = refusal(lambda: prompt_tokens(TemplateOnly(lines), TokenPrompt(token_ids=token_ids), 1024))

    assert str(bad) in why.failure.message
    assert "1024" in why.failure.message


@pytest.mark.parametrize("prompt", [TextPrompt(text=""), TokenPrompt(token_ids=())])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    """There is no token to start from."""
    assert refusal(lambda: prompt_tokens(TemplateOnly(lines), prompt, 256)).failure.param == "prompt"


def request(max_tokens: int | None = None, **more: Any) -> Generate:
    return Generate(
        request_id=RequestId("r"), prompt=TextPrompt(text="x"), sampling=Sampling(), max_tokens=max_tokens, **more
    )


@pytest.mark.parametrize(
    ("asked", "prompt_tokens", "context", "granted"),
    [(None, 10, 100, 90), (5, 10, 100, 5), (1_000_000, 10, 100, 90), (1, 99, 100, 1), (None, 99, 100, 1)],
)
def test_max_tokens_are_clipped_to_the_context(
    asked: int | None, prompt_tokens: int, context: int, granted: int
) -> None:
    """C01, C09: huge is no buffer of that size, and the row ends at the context's end."""
    assert resolve_max_tokens(request(asked), prompt_tokens, context) == granted


@pytest.mark.parametrize("prompt_tokens", [100, 101, 6025])
def test_a_prompt_over_the_context_is_refused_with_both_numbers(prompt_tokens: int) -> None:
    """C09: before any work."""
    failure = refusal(lambda: resolve_max_tokens(request(), prompt_tokens, 100)).failure

    assert failure.kind is FailureKind.CONTEXT_LENGTH_EXCEEDED
    assert str(prompt_tokens) in failure.message
    assert "100" in failure.message


# --- the text plane -------------------------------------------------------------------------------------------------


def plane(tokenizer: Any, out: list[Any]) -> TextPlane:
    made = TextPlane(
        tokenizer=tokenizer,
        questions=TokenQuestions(tokenizer, tokenizer, context_tokens=50),
        context_tokens=50,
        deliver=out.append,
        send=out.append,
        clock=lambda: 7.0,
    )
    made.weights_loaded(LoadedWeights(vocabulary_size=256, fingerprint="f"))
    return made


def test_the_text_plane_names_the_prefix() -> None:
    """Its tokens, its end, its digests, its arrival."""
    done = plane(TemplateOnly(lines), []).prepare(replace(request(), prompt=TextPrompt(text="a" * 40)), 7.0)

    assert done.token_ids == (97,) * 40
    assert done.max_tokens == 10
    assert len(done.grains) == 2
    assert done.arrived == 7.0


def test_a_logit_bias_outside_the_vocabulary_is_refused() -> None:
    """It would write beside the array."""
    biased = replace(request(), sampling=Sampling(logit_bias={256: 1.0}))

    assert refusal(lambda: plane(TemplateOnly(lines), []).prepare(biased, 0.0)).failure.param == "logit_bias"


def test_a_check_refuses_what_would_be_refused_and_runs_nothing() -> None:
    """C09: by the tokenizer and the context before the weights are there, and by memory and vocabulary after."""
    tokenizer = TemplateOnly(lines)
    out: queue.SimpleQueue[Any] = queue.SimpleQueue()
    text_plane = TextPlane(
        tokenizer=tokenizer,
        questions=TokenQuestions(tokenizer, tokenizer, context_tokens=50),
        context_tokens=50,
        deliver=out.put,
        send=out.put,
        clock=lambda: 7.0,
    )
    text_plane.start()

    def asked(characters: int, **changes: Any) -> Any:
        generate = replace(request(), prompt=TextPrompt(text="a" * characters), **changes)
        text_plane.submit(Check(request_id=RequestId("c"), generate=generate))
        answer = out.get(timeout=10)
        return answer.prompt_tokens if isinstance(answer, Checked) else answer.failure.kind

    assert asked(49) == 49
    assert asked(50) is FailureKind.CONTEXT_LENGTH_EXCEEDED
    text_plane.weights_loaded(LoadedWeights(vocabulary_size=256, fingerprint="f", row_tokens=40))
    assert asked(39) == 39
    assert asked(49) is FailureKind.CONTEXT_LENGTH_EXCEEDED
    assert asked(1, sampling=Sampling(logit_bias={256: 1.0})) is FailureKind.INVALID_REQUEST
    assert out.empty()


def test_a_tokenizer_that_raises_still_answers() -> None:
    """Every request ends: the thread lives on, and the next request is served."""

    class Broken(TemplateOnly):
        def encode(self, text: str, **kwargs: Any) -> list[int]:
            if text == "bad":
                raise RuntimeError("secret prompt")
            return super().encode(text)

    out: queue.SimpleQueue[Any] = queue.SimpleQueue()
    broken = Broken(lines)
    text_plane = TextPlane(
        tokenizer=broken,
        questions=TokenQuestions(broken, broken, context_tokens=50),
        context_tokens=50,
        deliver=out.put,
        send=out.put,
        clock=lambda: 7.0,
    )
    text_plane.weights_loaded(LoadedWeights(vocabulary_size=256, fingerprint="f"))
    with capture_logs() as logged:
        text_plane.start()
        text_plane.submit(replace(request(), prompt=TextPrompt(text="bad")))
        text_plane.submit(request())
        failed, queued, prepared = (out.get(timeout=10) for _ in range(3))

    assert "secret" not in str(logged)  # S02
    assert logged[0]["error"] == "RuntimeError"
    assert failed.failure.kind is FailureKind.INTERNAL
    assert "secret" not in failed.failure.message
    assert queued.prompt_tokens == 1
    assert prepared.token_ids == (120,)
