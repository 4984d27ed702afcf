"""Reasoning that is held to a budget: what is forced, when, and what stays free; then in the engine, beside others."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.tools import OneOf
from tests.fakes.char_tokenizer import END, char_tokenizer
from tests.worker.engine_parts import Desk, Model, prompt
from tests.worker.parts import GREEDY, prepared
from tests.worker.tiny_models import VOCABULARY, make_tiny_model
from worker.answers import formats
from worker.answers.plan import AnswerPlan
from worker.answers.thinking import HARMONY, Start, ThinkSyntax, end_of_thinking
from worker.detokenizer import WindowDetokenizer, detokenizer_maker
from worker.grammar_compiler import GrammarCompiler
from worker.grammars import Frame, grammar
from worker.mlx_model import load_model
from worker.row_answer import RowAnswer
from worker.sequence import Matcher, resumed
from worker.thinking_budget import ThinkingBudget, closing_tokens

WORDS = ("a ", "b ", "<think>", "</think>", "\n", "c ", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>")
"""A vocabulary of whole texts."""
A, B, OPENS, CLOSES, LINE, C, CALLS, CALL, CALLED = range(9)
CLOSING = (LINE, CLOSES)
ONE_CALL = (CALLS, CALL, CALLED)
THINK = ThinkSyntax(opens=("<think>",), closes=("</think>",))


class WordTexts:
    """Token texts of `WORDS`."""

    def push(self, token_id: int) -> str:
        return WORDS[token_id]

    def flush(self) -> str:
        return ""


def answer_of(
    starts: Start, syntax: ThinkSyntax = THINK, form: formats.CallFormat | None = formats.HERMES
) -> RowAnswer:
    plan = AnswerPlan(thinking=syntax, starts=starts, form=form)
    return RowAnswer(RequestId("r"), plan.parser(), lambda: "call")


def budget(most_tokens: int, *, starts: Start = "thinking", inner: Matcher | None = None) -> ThinkingBudget:
    return ThinkingBudget(
        most_tokens=most_tokens, closing=CLOSING, answer=answer_of(starts), texts=WordTexts(), inner=inner
    )


def only(mask: bytes | None) -> int | None:
    """The one token that a mask allows; None: it allows any."""
    if mask is None:
        return None
    bits = int.from_bytes(mask, "little")
    assert bits.bit_count() == 1
    return bits.bit_length() - 1


def drawn(matcher: Matcher, wishes: Iterator[int], tokens: int) -> list[int]:
    """What a row draws of what its model wishes, pipelined as the engine does it: while the matcher does not bind, a
    token is drawn before the one before it was consumed."""
    said: list[int] = []
    unread: int | None = None
    while len(said) < tokens:
        if matcher.binds and unread is not None:
            matcher.consume(unread)
            unread = None
        forced = only(matcher.next_mask()) if matcher.binds else None
        wish = next(wishes)
        token = wish if forced is None else forced
        said.append(token)
        if unread is not None:
            matcher.consume(unread)
        unread = token
    return said


@pytest.mark.parametrize(
    ("most_tokens", "starts", "wishes", "expected"),
    [
        # the prompt opened the block
        (3, "thinking", [A] * 9, [A, A, A, LINE, CLOSES, A, A, A]),
        (1, "thinking", [A] * 9, [A, LINE, CLOSES, A, A, A, A, A]),
        (0, "thinking", [A] * 9, [LINE, CLOSES, A, A, A, A, A, A]),
        # it ends by itself, before or just in time
        (3, "thinking", [A, CLOSES, B, B, B, B, B, B], [A, CLOSES, B, B, B, B, B, B]),
        (3, "thinking", [A, A, CLOSES, B, B, B, B, B], [A, A, CLOSES, B, B, B, B, B]),
        # the model opens it, which is a token of it; or does not
        (3, "answer", [OPENS, *[A] * 8], [OPENS, A, A, LINE, CLOSES, A, A, A]),
        (0, "answer", [OPENS, *[A] * 8], [OPENS, LINE, CLOSES, A, A, A, A, A]),
        (0, "answer", [B] * 9, [B] * 8),
        # it opens another: that is closed at once
        (2, "thinking", [A, A, A, A, OPENS, A, A, A], [A, A, LINE, CLOSES, OPENS, LINE, CLOSES, A]),
        # behind a call, too, though what it closes was no answer
        (1, "thinking", [A, A, A, *ONE_CALL, OPENS, A, A, A], [A, *CLOSING, *ONE_CALL, OPENS, *CLOSING]),
        (0, "answer", [*ONE_CALL, OPENS, A, A, A], [*ONE_CALL, OPENS, *CLOSING, A]),
        (0, "answer", [B, *ONE_CALL, OPENS, A, A], [B, *ONE_CALL, OPENS, *CLOSING]),
        # markers in the answer are text
        (1, "thinking", [A, A, A, B, OPENS, B, B, B], [A, LINE, CLOSES, B, OPENS, B, B, B]),
    ],
)
def test_what_is_forced(most_tokens: int, starts: Start, wishes: list[int], expected: list[int]) -> None:
    """The end comes when the budget is drawn, not earlier and only if the model did not end by itself; then all is
    free."""
    assert drawn(budget(most_tokens, starts=starts), iter(wishes), len(expected)) == expected


def wishes_of(tokens: int) -> st.SearchStrategy[list[int]]:
    """Of any tokens, whole calls often among them."""
    pieces = st.one_of(st.sampled_from(range(len(WORDS))).map(lambda token: (token,)), st.just(ONE_CALL))
    return st.lists(pieces, min_size=tokens, max_size=tokens).map(lambda some: [*chain.from_iterable(some)][:tokens])


STARTS: st.SearchStrategy[Start] = st.sampled_from(["thinking", "answer"])


@given(st.integers(0, 6), STARTS, wishes_of(40))
def test_no_more_than_the_budget(most_tokens: int, starts: Start, wishes: list[int]) -> None:
    """Whatever a model wishes, all its blocks together have no more thoughts than the budget, and nothing is forced but
    the end of a block."""
    answer = answer_of(starts)
    thoughts = 0
    for token, wish in zip(drawn(budget(most_tokens, starts=starts), iter(wishes), 40), wishes, strict=True):
        was_thinking = answer.is_thinking
        answer.drew()
        answer.push(WORDS[token])
        if token != wish:
            assert was_thinking
            assert token in CLOSING
        elif was_thinking and token in (A, B, C, *ONE_CALL):
            thoughts += 1
    assert thoughts <= most_tokens


@given(st.integers(0, 4), STARTS, wishes_of(20))
def test_pipelined_or_not_the_same(most_tokens: int, starts: Start, wishes: list[int]) -> None:
    """Beside a constrained row every token is read before the next is drawn; it changes nothing."""
    matcher = budget(most_tokens, starts=starts)
    said: list[int] = []
    for wish in wishes:
        forced = only(matcher.next_mask())
        said.append(wish if forced is None else forced)
        matcher.consume(said[-1])
    assert said == drawn(budget(most_tokens, starts=starts), iter(wishes), len(wishes))


def test_it_does_not_bind_while_there_is_much_left() -> None:
    """A long thought is drawn as ahead as any other: only its end costs."""
    matcher = budget(100)
    binding = 0
    for _ in range(90):
        binding += matcher.binds
        matcher.consume(A)
    assert binding == 0
    for token in (*[A] * 10, *CLOSING, *[A] * 10):
        binding += matcher.binds
        matcher.consume(token)
    assert 0 < binding < 6


def test_a_token_that_was_drawn_before_is_none_of_the_end() -> None:
    """Where one token ends a call and opens a block, the next is drawn already: the end follows it, whole, unless it
    ended the block itself."""

    class Texts(WordTexts):
        def push(self, token_id: int) -> str:
            return "</tool_call><think>" if token_id == CALLED else WORDS[token_id]

    def says(*wishes: int) -> list[int]:
        matcher = ThinkingBudget(most_tokens=0, closing=CLOSING, answer=answer_of("answer"), texts=Texts())
        return drawn(matcher, iter(wishes), len(wishes))

    assert says(*ONE_CALL, A, A, A, B) == [*ONE_CALL, A, *CLOSING, B]
    assert says(*ONE_CALL, LINE, A, B, B) == [*ONE_CALL, *CLOSING, B, B]
    assert says(*ONE_CALL, CLOSES, B, B, B) == [*ONE_CALL, CLOSES, B, B, B]


def test_no_half_character_is_left() -> None:
    """Of a character that several tokens make, the rest may come although the budget is drawn."""
    pieces = [b"ok ", b"\xf0\x9f", b"\x91\xa9", b"!", b"\n", b"</think>"]

    def decode(token_ids: list[int]) -> str:
        return b"".join(pieces[token] for token in token_ids).decode(errors="replace")

    matcher = ThinkingBudget(
        most_tokens=2, closing=(4, 5), answer=answer_of("thinking"), texts=WindowDetokenizer(decode)
    )
    assert drawn(matcher, iter([0, 1, 2, 3, 3, 3]), 6) == [0, 1, 2, 4, 5, 3]


def test_how_families_end_their_thoughts() -> None:
    """gpt-oss ends a message and begins another; whose channel is its own choice where it may call."""
    assert end_of_thinking(THINK, "answer") == "\n</think>"
    assert end_of_thinking(HARMONY, "answer") == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert end_of_thinking(HARMONY, "anything") == "<|end|><|start|>assistant"


def test_harmony_goes_on_with_an_answer() -> None:
    """Its parts are told apart as if the model had ended them."""
    opens, thought, answered = "<|channel|>analysis<|message|>", "hm ", "so"
    words = (opens, thought, "<|end|>", "<|start|>", "assistant", "<|channel|>final<|message|>", answered)
    answer = answer_of("answer", HARMONY)

    class Texts(WordTexts):
        def push(self, token_id: int) -> str:
            return words[token_id]

    matcher = ThinkingBudget(most_tokens=3, closing=(2, 3, 4, 5), answer=answer, texts=Texts())
    assert drawn(matcher, iter([0, *[1] * 6, 6, 6]), 9) == [0, 1, 1, 2, 3, 4, 5, 6, 6]
    assert not answer.is_thinking


def test_a_tokenizer_that_cannot_write_it() -> None:
    """What comes out as another text, or outside the logits, is not forced."""
    assert closing_tokens("\n</think>", lambda _: CLOSING, WordTexts(), 6) == CLOSING
    assert closing_tokens("\n</think>", lambda _: (LINE, A), WordTexts(), 6) == ()
    assert closing_tokens("\n</think>", lambda _: CLOSING, WordTexts(), 3) == ()
    assert closing_tokens("\n</think>", lambda _: (), WordTexts(), 6) == ()


# --- in the engine ---------------------------------------------------------------------------------------------------

SHUT = (7, 3)
"""Token 7 is `<7>`: in a model of noise any two tokens can be the end of reasoning."""
NOISE = ThinkSyntax(opens=("<64>",), closes=("<7><3>",))


class NumberTexts:
    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


def noise_budget(most_tokens: int) -> ThinkingBudget:
    return ThinkingBudget(
        most_tokens=most_tokens, closing=SHUT, answer=answer_of("thinking", NOISE), texts=NumberTexts()
    )


def held_to(model: Model, token_ids: Sequence[int], most_tokens: int, tokens: int) -> list[int]:
    """What mlx-lm itself says, asked twice: the thought, and what follows when it was ended."""
    thought = model.says(token_ids, most_tokens) if most_tokens else []
    shut = [*thought, *SHUT]
    return [*shut, *model.says([*token_ids, *shut], tokens - len(shut))]


@pytest.fixture(scope="module", params=["llama", "qwen3_next", "gemma3_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One whose cache can be cut, one with recurrent state, one with a window."""
    path = make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    return Model(load_model(path, lambda _done, _total: None))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    return Model(load_model(path, lambda _done, _total: None))


def test_held_and_free_rows_beside_each_other(model: Model) -> None:
    """Rows of several budgets and free ones, joining at different steps: each says what it says alone."""
    desk = Desk(model)
    budgets = (0, 1, 2, 5, 17)
    for i, most_tokens in enumerate(budgets):
        desk.start(f"held {i}", prompt(i, 9 + i), max_tokens=30, matcher=noise_budget(most_tokens))
        desk.step()
        desk.start(f"free {i}", prompt(50 + i, 20 + i), max_tokens=30)
        desk.step()
    desk.run()
    for i, most_tokens in enumerate(budgets):
        assert desk.drawn[f"held {i}"] == held_to(model, prompt(i, 9 + i), most_tokens, 30)
        assert desk.drawn[f"free {i}"] == model.says(prompt(50 + i, 20 + i), 30)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=2.0, seed=1), Sampling(seed=2, top_k=1, logit_bias={7: -100.0})]
)
def test_no_setting_goes_on_thinking(llama: Model, sampling: Sampling) -> None:
    """The end is drawn whatever penalties, biases and heat say."""
    desk = Desk(llama)
    desk.start("held", prompt(3, 9), max_tokens=20, sampling=sampling, matcher=noise_budget(6))
    desk.run()
    assert tuple(desk.drawn["held"][6:8]) == SHUT


@pytest.mark.parametrize("before", range(1, 10))
def test_a_row_that_gave_way_goes_on(llama: Model, before: int) -> None:
    """Preempted at any moment, while it thinks, while its end is forced, or after: it goes on as if it had not been."""
    desk = Desk(llama)
    desk.start("held", prompt(4, 9), max_tokens=16, matcher=noise_budget(5))
    while len(desk.drawn["held"]) < before:
        desk.step()
    desk.read()
    said = list(desk.drawn["held"])
    request, _ = desk._running["held"]
    again = resumed(request, desk.engine.token_ids(RequestId("held")), len(said))
    desk.leave("held")
    desk.engine.open(again, ())
    desk.engine.prefill(again.request_id, len(again.token_ids) - 1)
    desk.engine.join(again.request_id)
    while len(said) < 16:
        said += [token.token_id for token in desk.engine.decode()]
    assert said[:16] == held_to(llama, prompt(4, 9), 5, 16)


def test_parked_and_mixed(llama: Model) -> None:
    """Taken out of the batch while its end is forced, and in passes that read another's prompt, too."""
    desk = Desk(llama)
    for steps in (5, 6, 7):
        name = f"held {steps}"
        desk.start(name, prompt(4, 9), max_tokens=16, matcher=noise_budget(5))
        while len(desk.drawn[name]) < steps:
            desk.step()
        desk.read()
        desk.engine.park(RequestId(name))
        desk.engine.join(RequestId(name))
        desk.run()
        assert desk.drawn[name] == held_to(llama, prompt(4, 9), 5, 16)
    assert desk.engine.mixes
    desk.start("held", prompt(4, 9), max_tokens=16, matcher=noise_budget(5))
    other = prepared("other", prompt(9, 60))
    desk.engine.open(other, ())
    said: list[int] = []
    for _ in range(10):
        said += [token.token_id for token in desk.engine.prefill_and_decode(other.request_id, 5)]
    assert said == held_to(llama, prompt(4, 9), 5, 10)


TOKENIZER: Any = char_tokenizer()
END_ID: int = TOKENIZER.convert_tokens_to_ids(END)
MARKED = ThinkSyntax(opens=("<mark>",), closes=("</mark>",))


@pytest.mark.parametrize("most_tokens", [0, 1, 7])
def test_a_constrained_answer_follows(llama: Model, most_tokens: int) -> None:
    """The thought is ended, and what follows keeps to its grammar: of a model of noise, which never would."""
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY, [END_ID])
    frame = Frame(opens="<mark>", closes="</mark>", begins="thinking", markers=("<mark>", "</mark>"))
    text = grammar(OneOf(options=("green", "blue")), None, frame, compiler.special_ids(frame.markers))
    make: Callable[[], WindowDetokenizer] = detokenizer_maker(TOKENIZER)  # pyright: ignore[reportAssignmentType]

    def encode(said: str) -> list[int]:
        return TOKENIZER.encode(said, add_special_tokens=False)

    closing = closing_tokens("\n</mark>", encode, make(), VOCABULARY)
    assert len(closing) == 2
    matcher = ThinkingBudget(
        most_tokens=most_tokens,
        closing=closing,
        answer=answer_of("thinking", MARKED),
        texts=make(),
        inner=compiler.compile(text),
    )
    desk = Desk(llama)
    desk.start("held", prompt(6, 9), max_tokens=60, matcher=matcher, sampling=GREEDY)
    said: list[int] = desk.drawn["held"]
    for _ in count():
        desk.step()
        if END_ID in said or len(said) >= 60:
            break
    thought, _, answer = TOKENIZER.decode(said[: said.index(END_ID)]).partition("</mark>")
    assert answer.strip() in ("green", "blue")
    assert len(encode(thought.removesuffix("\n"))) <= most_tokens + 1
    assert tuple(said[most_tokens : most_tokens + 2]) == closing
