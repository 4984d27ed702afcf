"""Texts of a request → rows of tokens that fit the model. Decides only, but for the tokenizer that it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from protocol.failures import Failure, FailureKind
from protocol.generation import Embed, Rerank, TextPrompt, TokenPrompt
from protocol.model_kind import ModelKind, UnsupportedFolder
from worker.embedding.recipe import Recipe
from worker.embedding.rows import PreparedRows, TokenRow
from worker.prompts import PromptRefused

RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What a reranking decoder is told that it judges by; it was trained with these words."""

_JUDGE_OPENING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_JUDGE_CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The prompt that Qwen3's rerankers were trained with, letter for letter: another one gives other scores."""


class AnswerVocabulary(Protocol):
    """What a Hugging Face tokenizer says of single tokens."""

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...


def answer_ids(vocabulary: AnswerVocabulary, kind: ModelKind) -> tuple[int, int] | None:
    """The tokens by which a reranking decoder says yes and no; None for other kinds. Raises UnsupportedFolder."""
    if kind != "decoder_reranker":
        return None
    yes, no = vocabulary.convert_tokens_to_ids("yes"), vocabulary.convert_tokens_to_ids("no")
    if yes is None or no is None or yes == no:
        raise UnsupportedFolder("its tokenizer has no tokens `yes` and `no`, by which this kind of reranker judges")
    return yes, no


class RowTokenizer(Protocol):
    """What a Hugging Face tokenizer offers."""

    def __call__(self, text: str, text_pair: str | None = None, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """What a request must keep to. `dimensions` is a vector's size, None of a model that gives scores."""

    context_tokens: int
    vocabulary_size: int
    dimensions: int | None


class Inputs:
    """Prepares requests for one model. Belongs to one thread."""

    def __init__(self, tokenizer: RowTokenizer, kind: ModelKind, recipe: Recipe, limits: InputLimits) -> None:
        self._tokenizer = tokenizer
        self._kind: ModelKind = kind
        self._recipe = recipe
        self._limits = limits

    def prepare(self, asked: Embed | Rerank, arrived: float) -> PreparedRows:
        """Raises PromptRefused."""
        rows = self._embed_rows(asked) if isinstance(asked, Embed) else self._rerank_rows(asked)
        return PreparedRows(request=asked, rows=tuple(rows), arrived=arrived)

    # --- embeddings --------------------------------------------------------------------------------------------------

    def _embed_rows(self, asked: Embed) -> list[TokenRow]:
        dimensions = self._limits.dimensions
        if dimensions is None:
            raise PromptRefused(
                Failure(
                    kind=FailureKind.UNSUPPORTED,
                    message="this model gives no vectors, only scores; use it for rerank",
                    param="model",
                )
            )
        if asked.dimensions is not None and not 1 <= asked.dimensions <= dimensions:
            raise _refused(f"`dimensions` must be from 1 to {dimensions}, the size of its vectors", "dimensions")
        rows: list[TokenRow] = []
        for index, given in enumerate(asked.inputs):
            where = f"input[{index}]"
            match given:
                case TextPrompt(text=text):
                    rows.append(self._fitting(self._encode(text), where, asked.overlong))
                case TokenPrompt(token_ids=token_ids):
                    self._check_vocabulary(token_ids, where)
                    kept = token_ids[: self._limits.context_tokens] if asked.overlong == "cut" else token_ids
                    rows.append(self._fitting(TokenRow(token_ids=kept), where, "refuse"))
        return rows

    def _check_vocabulary(self, token_ids: Sequence[int], where: str) -> None:
        size = self._limits.vocabulary_size
        bad = next((token for token in token_ids if not 0 <= token < size), None)
        if bad is not None:
            raise _refused(f"{where}: token id {bad} is outside the model's vocabulary of {size}", where)

    # --- rerank ------------------------------------------------------------------------------------------------------

    def _rerank_rows(self, asked: Rerank) -> list[TokenRow]:
        if self._kind in ("cross_encoder", "decoder_reranker"):
            return [
                self._pair(asked.query, text, f"documents[{index}]", asked.overlong)
                for index, text in enumerate(asked.documents)
            ]
        query = self._encode(self._recipe.query_prompt + asked.query)
        documents = [
            self._fitting(self._encode(self._recipe.document_prompt + text), f"documents[{index}]", asked.overlong)
            for index, text in enumerate(asked.documents)
        ]
        return [self._fitting(query, "query", "refuse"), *documents]

    def _pair(self, query: str, document: str, where: str, overlong: Literal["refuse", "cut"]) -> TokenRow:
        """Both texts in one row. What does not fit is cut off the document's end, never off the query's."""
        whole = self._pair_of(query, document)
        too_many = len(whole.token_ids) - self._limits.context_tokens
        if too_many <= 0:
            return whole
        tokens = self._plain(document)
        if too_many >= len(tokens):
            raise self._too_long(len(whole.token_ids) - len(tokens), "query")
        if overlong == "refuse":
            raise self._too_long(len(whole.token_ids), where)
        # A text cut between two tokens can have other tokens than those before the cut: cut until it fits.
        kept = len(tokens) - too_many
        while kept > 0:
            cut = self._pair_of(query, self._tokenizer.decode(tokens[:kept]))
            if len(cut.token_ids) <= self._limits.context_tokens:
                return cut
            kept -= len(cut.token_ids) - self._limits.context_tokens
        raise self._too_long(len(whole.token_ids), where)

    def _pair_of(self, query: str, document: str) -> TokenRow:
        if self._kind == "decoder_reranker":
            text = (
                f"{_JUDGE_OPENING}<Instruct>: {RERANK_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
                f"{_JUDGE_CLOSING}"
            )
            return TokenRow(token_ids=tuple(self._plain(text)))
        return _row_of(self._tokenizer(query, document))

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> TokenRow:
        return _row_of(self._tokenizer(text))

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _fitting(self, row: TokenRow, where: str, overlong: Literal["refuse", "cut"]) -> TokenRow:
        if not row.token_ids:
            raise _refused(f"{where} holds no token; send at least one character", where)
        most = self._limits.context_tokens
        if len(row.token_ids) <= most:
            return row
        if overlong == "refuse":
            raise self._too_long(len(row.token_ids), where)
        return TokenRow(
            token_ids=(*row.token_ids[: most - 1], row.token_ids[-1]),  # the last one ends the text, [SEP] for instance
            type_ids=None if row.type_ids is None else row.type_ids[:most],
        )

    def _too_long(self, tokens: int, where: str) -> PromptRefused:
        message = (
            f"{where} has {tokens} tokens and this model's context is {self._limits.context_tokens}; "
            "send a shorter text, or `truncate: true` to have its end cut off"
        )
        return PromptRefused(Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message=message, param=where))


def _row_of(encoded: Any) -> TokenRow:
    type_ids = encoded.get("token_type_ids")
    return TokenRow(
        token_ids=tuple(encoded["input_ids"]), type_ids=None if type_ids is None else tuple(int(i) for i in type_ids)
    )


def _refused(message: str, param: str) -> PromptRefused:
    return PromptRefused(Failure(kind=FailureKind.INVALID_REQUEST, message=message, param=param))
