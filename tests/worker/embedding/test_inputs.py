"""Texts → rows: pairs, prompts, limits, cuts; refused by the place at fault."""

from typing import Any

import pytest

from protocol.failures import Failure, FailureKind
from protocol.generation import Embed, Rerank, TextPrompt, TokenPrompt
from protocol.ids import RequestId
from protocol.model_kind import ModelKind, UnsupportedFolder
from worker.embedding.inputs import InputLimits, Inputs, answer_ids
from worker.embedding.recipe import Recipe
from worker.prompts import PromptRefused

FIRST, SEPARATOR = 1, 2
ID = RequestId("r")


class Letters:
    """Every letter is a token; [first] … [separator] around a text, and another separator behind its pair."""

    def __call__(self, text: str, text_pair: str | None = None, **kwargs: Any) -> Any:
        tokens = [ord(letter) for letter in text]
        if not kwargs.get("add_special_tokens", True):
            return {"input_ids": tokens}
        head = [FIRST, *tokens, SEPARATOR]
        if text_pair is None:
            return {"input_ids": head, "token_type_ids": [0] * len(head)}
        tail = [*(ord(letter) for letter in text_pair), SEPARATOR]
        return {"input_ids": head + tail, "token_type_ids": [0] * len(head) + [1] * len(tail)}

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token) for token in token_ids)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        return {"yes": 7, "no": 8}.get(tokens)


def inputs(kind: ModelKind = "embedder", *, context: int = 12, dimensions: int | None = 4, **recipe: Any) -> Inputs:
    limits = InputLimits(context_tokens=context, vocabulary_size=200, dimensions=dimensions)
    return Inputs(Letters(), kind, Recipe(pooling="mean", **recipe), limits)


def texts(*given: str) -> tuple[TextPrompt, ...]:
    return tuple(TextPrompt(text=text) for text in given)


def refusal(made: Inputs, asked: Embed | Rerank) -> Failure:
    with pytest.raises(PromptRefused) as caught:
        made.prepare(asked, 0.0)
    return caught.value.failure


def spelled(made: Inputs, asked: Embed | Rerank) -> list[str]:
    return ["".join(chr(token) for token in row.token_ids) for row in made.prepare(asked, 0.0).rows]


def test_a_text_has_special_tokens_and_token_ids_have_what_they_have() -> None:
    """As OpenAI's own API: ids are taken as they are."""
    asked = Embed(request_id=ID, inputs=(*texts("ab"), TokenPrompt(token_ids=(97, 98))))
    prepared = inputs().prepare(asked, 3.0)
    assert [row.token_ids for row in prepared.rows] == [(FIRST, 97, 98, SEPARATOR), (97, 98)]
    assert (prepared.prompt_tokens, prepared.arrived) == (6, 3.0)


def test_a_pair_is_one_row_with_types() -> None:
    """A cross-encoder reads query and document together."""
    (row,) = (
        inputs("cross_encoder", dimensions=None).prepare(Rerank(request_id=ID, query="q", documents=("de",)), 0.0).rows
    )
    assert row.token_ids == (FIRST, 113, SEPARATOR, 100, 101, SEPARATOR)
    assert row.type_ids == (0, 0, 0, 1, 1, 1)


def test_an_embedder_ranks_by_its_own_prompts() -> None:
    """The query is the first row, each text behind the prompt that the folder has for it."""
    made = inputs(query_prompt="Q:", document_prompt="D:")
    assert [text[1:-1] for text in spelled(made, Rerank(request_id=ID, query="q", documents=("d", "e")))] == [
        "Q:q",
        "D:d",
        "D:e",
    ]


def test_a_judge_is_asked_in_the_words_it_was_trained_with() -> None:
    """Query and document stand in the chat turn that the model answers with yes or no."""
    made = inputs("decoder_reranker", dimensions=None, context=1000)
    (text,) = spelled(made, Rerank(request_id=ID, query="why", documents=("because",)))
    assert text.startswith("<|im_start|>system\nJudge whether")
    assert "\n<Query>: why\n<Document>: because<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n" in text


@pytest.mark.parametrize(
    ("kind", "asked", "failed", "param"),
    [
        ("embedder", Embed(request_id=ID, inputs=texts("a", "b" * 11)), "context_length_exceeded", "input[1]"),
        ("embedder", Embed(request_id=ID, inputs=texts("a"), dimensions=5), "invalid_request", "dimensions"),
        ("embedder", Embed(request_id=ID, inputs=(TokenPrompt(token_ids=(200,)),)), "invalid_request", "input[0]"),
        ("embedder", Embed(request_id=ID, inputs=(TokenPrompt(token_ids=()),)), "invalid_request", "input[0]"),
        ("cross_encoder", Embed(request_id=ID, inputs=texts("a")), "unsupported", "model"),
        (
            "cross_encoder",
            Rerank(request_id=ID, query="q", documents=("d", "e" * 9)),
            "context_length_exceeded",
            "documents[1]",
        ),
        ("cross_encoder", Rerank(request_id=ID, query="q" * 10, documents=("d",)), "context_length_exceeded", "query"),
        ("embedder", Rerank(request_id=ID, query="q" * 11, documents=("d",)), "context_length_exceeded", "query"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(
    kind: ModelKind, asked: Embed | Rerank, failed: str, param: str
) -> None:
    """C09: which one, in the API's own spelling."""
    made = inputs(kind, dimensions=None if kind == "cross_encoder" else 4)
    failure = refusal(made, asked)
    assert (failure.kind, failure.param) == (FailureKind(failed), param)


def test_a_cut_text_keeps_its_last_special_token() -> None:
    """A text that is cut still ends as a text of this model ends."""
    asked = Embed(request_id=ID, inputs=texts("abcdefghijklmn"), overlong="cut")
    assert spelled(inputs(context=6), asked) == [f"{chr(FIRST)}abcd{chr(SEPARATOR)}"]
    by_ids = Embed(request_id=ID, inputs=(TokenPrompt(token_ids=tuple(range(97, 107))),), overlong="cut")
    assert spelled(inputs(context=6), by_ids) == ["abcdef"]


def test_a_cut_pair_loses_the_documents_end() -> None:
    """Never the query's, and never the separators."""
    made = inputs("cross_encoder", dimensions=None, context=8)
    asked = Rerank(request_id=ID, query="qq", documents=("abcdef",), overlong="cut")
    assert spelled(made, asked) == [f"{chr(FIRST)}qq{chr(SEPARATOR)}abc{chr(SEPARATOR)}"]


def test_only_a_judge_needs_answers() -> None:
    """Its tokens for yes and no; a tokenizer without them cannot be a judge's."""

    class NoAnswers(Letters):
        def convert_tokens_to_ids(self, tokens: str) -> int | None:
            return None

    assert answer_ids(Letters(), "decoder_reranker") == (7, 8)
    assert answer_ids(NoAnswers(), "embedder") is None
    with pytest.raises(UnsupportedFolder):
        answer_ids(NoAnswers(), "decoder_reranker")
