"""Field cases of reasoning (D): what the model thinks is told apart from what it answers, whoever opens the block."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.http_answers import CHAT, COMPLETIONS, ask, assert_serves, body, user
from tests.fakes.live_service import LiveService, live_service
from tests.fakes.script_model import said_by

THINKER = "thinker"
_OPENED = "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def thinking_service(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """The script model with a template that opens the block itself, as Qwen's and DeepSeek's do."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(script_model, folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    head, found, tail = template.rpartition("<|im_start|>assistant\n")
    assert found
    (folder / "chat_template.jinja").write_text(head + _OPENED + tail, encoding="utf-8")
    with live_service({THINKER: folder}) as live:
        yield live


@pytest.fixture
def thinker(thinking_service: LiveService) -> Iterator[httpx.Client]:
    """Talks to it; afterwards it must still serve."""
    with thinking_service.client() as made:
        yield made
    assert_serves(thinking_service, THINKER)


def test_d01_the_prompt_opened_the_block(thinker: httpx.Client) -> None:
    """D01: only the closing tag comes, in pieces: what stands before it is reasoning, in both modes, and no piece of a
    tag is anywhere."""
    answer = ask(thinker, body(THINKER, said="SC16"))
    assert answer.reasoning.strip() == "implicit16 reasoning"
    assert (answer.text.strip(), answer.finish) == ("answer16", "stop")


def test_d01_the_model_opened_the_block(client: httpx.Client) -> None:
    """D01: both tags, each one token; the bill says how much of the answer was thought."""
    answer = ask(client, body(MODEL, said="SC15"))
    assert (answer.reasoning, answer.text, answer.finish) == ("why15 because", "answer15", "stop")
    assert answer.usage is not None
    assert 0 < answer.usage["completion_tokens_details"]["reasoning_tokens"] < answer.completion_tokens


def test_d02_a_cut_inside_the_block(client: httpx.Client, thinker: httpx.Client) -> None:
    """D02: all text is reasoning, none is the answer's, nothing comes twice, finish length."""
    answer = ask(client, body(MODEL, said="SC18", max_tokens=10))
    assert (answer.text, answer.finish) == ("", "length")
    assert said_by("SC18").removeprefix("<think>").startswith(answer.reasoning)
    assert len(answer.reasoning.split()) == 9
    opened = ask(thinker, body(THINKER, said="SC16", max_tokens=1))
    assert (opened.text, opened.reasoning.strip(), opened.finish) == ("", "implicit16", "length")


def test_d02_a_block_that_never_closes(client: httpx.Client) -> None:
    """D02: one rule for both modes, and no text is lost or doubled."""
    answer = ask(client, body(MODEL, said="SC18"))
    assert answer.finish == "stop"
    assert (answer.reasoning + answer.text).split() == said_by("SC18").removeprefix("<think>").split()


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_d03_thinking_switched_off(thinker: httpx.Client, fields: dict[str, Any]) -> None:
    """D03: the whole answer is content; there is no reasoning, not even an empty one."""
    answer = ask(thinker, body(THINKER, said="SC04", **fields))
    assert (answer.text, answer.reasoning) == (said_by("SC04"), "")
    message = thinker.post(CHAT, json=body(THINKER, said="SC04", **fields)).json()["choices"][0]["message"]
    assert "reasoning_content" not in message


def test_d03_an_empty_block(client: httpx.Client) -> None:
    """D03: an empty block gives no reasoning at all, and its tags are no text."""
    answer = ask(client, body(MODEL, said="SC21"))
    assert (answer.text.strip(), answer.reasoning) == ("answer21", "")


def test_d03_a_model_that_does_not_think(client: httpx.Client) -> None:
    """D03: without tags everything is the answer."""
    answer = ask(client, body(MODEL, said="SC04"))
    assert (answer.text, answer.reasoning) == (said_by("SC04"), "")


def test_thoughts_can_be_left_out(client: httpx.Client) -> None:
    """vLLM's `include_reasoning: false`: the answer alone, at the same price."""
    answer = ask(client, body(MODEL, said="SC15", include_reasoning=False))
    assert (answer.text, answer.reasoning) == ("answer15", "")
    assert answer.completion_tokens == ask(client, body(MODEL, said="SC15")).completion_tokens


def test_the_legacy_route_keeps_the_text_as_it_is(client: httpx.Client) -> None:
    """A completion is what the model wrote, tags and all."""
    answer = ask(client, body(MODEL, prompt="<|SC15|>"), path=COMPLETIONS)
    assert answer.text == said_by("SC15")


def test_thoughts_of_earlier_turns_reach_the_template(client: httpx.Client) -> None:
    """A history with reasoning under either name is served; the SDK passes both through."""
    for key in ("reasoning", "reasoning_content"):
        turns = [*user("SC15"), {"role": "assistant", "content": "a", key: "because"}, *user("SC04")]
        assert ask(client, body(MODEL, messages=turns)).text == said_by("SC04")


def test_the_sdk_sees_the_thoughts(service: LiveService, client: httpx.Client) -> None:
    """Clients read `reasoning_content` of deltas; joined it is that of the whole answer."""
    del client
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0) as sdk:
        stream = sdk.chat.completions.create(model=MODEL, messages=user("SC15"), stream=True)  # pyright: ignore
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why15 because"
    assert "".join(delta.content or "" for delta in deltas) == "answer15"


def test_logprobs_cover_thoughts_and_answer(client: httpx.Client) -> None:
    """Every token that was drawn has its logprob once, in both modes."""
    request = body(MODEL, said="SC15", logprobs=True, top_logprobs=1)
    whole = client.post(CHAT, json=request).json()
    tokens = [token["token"] for token in whole["choices"][0]["logprobs"]["content"]]
    # the end of the turn is drawn, too, and is no token of the text
    assert len(tokens) == whole["usage"]["completion_tokens"] - 1
    assert "".join(tokens) == said_by("SC15")


def test_an_answer_goes_on_from_the_assistants_text(client: httpx.Client) -> None:
    """C06: without the flag a new message, with vLLM's flag the text goes on; never an error, never empty."""
    turns = [*user("SC04"), {"role": "assistant", "content": "The capital of France is"}]
    new = ask(client, body(MODEL, messages=turns))
    assert (new.status, new.text) == (200, said_by("SC04"))
    goes_on = ask(client, body(MODEL, messages=turns, continue_final_message=True, add_generation_prompt=False))
    assert goes_on.status == 200
    assert goes_on.prompt_tokens < new.prompt_tokens


# --- budgets ---------------------------------------------------------------------------------------------------------

_THOUGHTS = said_by("SC19").split()


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 20},
        {"thinking_token_budget": 20},
        {"thinking_budget_tokens": 20},
        {"reasoning_budget": 20},
        {"chat_template_kwargs": {"thinking_budget": 20}},
    ],
)
def test_a_budget_ends_the_thought(thinker: httpx.Client, fields: dict[str, Any]) -> None:
    """Under each name: so many tokens are thought, the end is written for the model on top of them, and it answers.
    Whole and streamed are the same, and the bill says what was thought."""
    answer = ask(thinker, body(THINKER, said="SC19", **fields))
    assert (answer.reasoning.split(), answer.text, answer.finish) == (_THOUGHTS[:20], "answer15", "stop")
    assert answer.warnings == ()
    assert answer.usage is not None
    ends = 2  # a line's end and the mark
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 20 + ends
    assert answer.completion_tokens == 20 + ends + 2  # the answer, and its end


def test_a_budget_that_is_not_reached_changes_nothing(thinker: httpx.Client, client: httpx.Client) -> None:
    """Neither an end that comes by itself in time, nor an answer without a thought, nor what has no bound."""
    for said, fields in (
        ("SC16", {"thinking_budget": 200}),
        ("SC16", {"thinking_budget": -1}),
        ("SC16", {"thinking_budget": 2, "chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 2}),
    ):
        plain = {name: value for name, value in fields.items() if name != "thinking_budget"}
        held, free = ask(thinker, body(THINKER, said=said, **fields)), ask(thinker, body(THINKER, said=said, **plain))
        assert (held.reasoning, held.text, held.finish) == (free.reasoning, free.text, free.finish)
    answer = ask(client, body(MODEL, said="SC04", thinking_budget=0))
    assert (answer.text, answer.reasoning) == (said_by("SC04"), "")


def test_a_model_that_opens_the_block_itself(client: httpx.Client) -> None:
    """Its mark is a token of the thought; a mark in pieces is one as soon as it is whole."""
    answer = ask(client, body(MODEL, said="SC15", thinking_budget=2))
    assert (answer.reasoning, answer.text) == ("why15", "answer15")
    pieces = ask(client, body(MODEL, said="SC18", thinking_budget=5))
    assert (pieces.reasoning.split(), pieces.text) == (["never", "w00", "w01", "w02", "w03"], "answer15")


def test_no_budget_is_no_thought(thinker: httpx.Client) -> None:
    """0 switches thinking off where the template knows how; if it is on all the same, it is ended at once."""
    answer = ask(thinker, body(THINKER, said="SC04", reasoning_budget=0))
    assert (answer.text, answer.reasoning) == (said_by("SC04"), "")
    on = {"enable_thinking": True}
    forced = ask(thinker, body(THINKER, said="SC19", reasoning_budget=0, chat_template_kwargs=on))
    assert (forced.text, forced.reasoning) == ("answer15", "")


def test_a_constrained_answer_comes_after_the_budget(thinker: httpx.Client) -> None:
    """The schema holds what follows the thought, not the thought."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["red"]}}}
    answer = ask(thinker, body(THINKER, said="SC19", thinking_budget=7, response_format=schema, temperature=0))
    assert (answer.reasoning.split(), answer.text.strip(), answer.finish) == (_THOUGHTS[:7], '"red"', "stop")


def test_a_stop_string_still_stops(thinker: httpx.Client) -> None:
    """In the thought before the budget is drawn, and in the answer after it."""
    early = ask(thinker, body(THINKER, said="SC19", thinking_budget=20, stop=["t005"]))
    assert (early.reasoning.split(), early.text, early.finish) == (_THOUGHTS[:5], "", "stop")
    late = ask(thinker, body(THINKER, said="SC19", thinking_budget=20, stop=["er15"]))
    assert (late.reasoning.split(), late.text, late.finish) == (_THOUGHTS[:20], "answ", "stop")


def test_held_and_free_requests_at_once(thinker: httpx.Client) -> None:
    """Choices of one request and requests of others, each with its own budget or none."""
    answers = thinker.post(CHAT, json=body(THINKER, said="SC19", thinking_budget=9, n=3)).json()["choices"]
    assert [choice["message"]["reasoning_content"].split() for choice in answers] == [_THOUGHTS[:9]] * 3
    budgets = [3, None, 30, None, 60, 1]

    def one(tokens: int | None) -> list[str]:
        fields = {} if tokens is None else {"thinking_budget": tokens}
        return ask(thinker, body(THINKER, said="SC19", **fields)).reasoning.split()

    with ThreadPoolExecutor(len(budgets)) as threads:
        assert list(threads.map(one, budgets)) == [_THOUGHTS[:tokens] for tokens in budgets]


def test_messages_are_held_to_their_budget(thinker: httpx.Client) -> None:
    """Anthropic's `budget_tokens`, whole and streamed: of an endless thought, and the answer has its own part of
    `max_tokens`."""
    asked = {
        "model": THINKER,
        "max_tokens": 1100,
        "messages": user("SC20"),
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = thinker.post("/v1/messages", json=asked)
    assert "x-mlxd-ignored-params" not in whole.headers
    thought, answer = whole.json()["content"]
    assert (thought["type"], thought["thinking"].split()) == ("thinking", ["la"] * 1024)
    assert (answer["type"], answer["text"]) == ("text", "answer15")
    assert whole.json()["stop_reason"] == "end_turn"
    assert whole.json()["usage"]["output_tokens"] == 1024 + 2 + 2
    with thinker.stream("POST", "/v1/messages", json={**asked, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas).split() == ["la"] * 1024
    assert "".join(delta.get("text", "") for delta in deltas) == "answer15"


def test_a_model_whose_thoughts_are_not_known(script_model: Path, tmp_path: Path) -> None:
    """Nothing can end them: the answer says so."""
    folder = tmp_path / "model"
    shutil.copytree(script_model, folder)
    for path in folder.glob("*token*.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("think>", "other>"), encoding="utf-8")
    profile = 'profiles.brief = {model = "other", thinking_budget = 10}'
    with live_service({"other": folder}, settings_toml=profile) as live, live.client() as made:
        assert ask(made, body("other", said="SC19", thinking_budget=10)).warnings == ("thinking_budget_not_held",)
        assert ask(made, body("other", said="SC19")).warnings == ()
        assert ask(made, body("brief", said="SC19")).warnings == ("thinking_budget_not_held",)
