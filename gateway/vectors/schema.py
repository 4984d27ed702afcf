"""What clients send to the embeddings and rerank routes, and what they get, field by field."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.answer_details import DetailsObject
from gateway.openai.schema import ModelId, PositiveInt, ShortText, TokenId

MOST_INPUTS = 2048
"""OpenAI's own limit."""


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings. `truncate` cuts the end off an input that is too long, else that is an error."""

    model: ModelId
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    truncate: bool | None = None
    user: ShortText | None = None
    service_tier: ShortText | None = None
    priority: int | float | str | None = None


class DocumentObject(Struct, frozen=True, kw_only=True):
    """A document, as Jina's and Cohere's first API wrap it."""

    text: str


class RerankRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/rerank. `truncate` as for embeddings, of documents."""

    model: ModelId
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | DocumentObject], Meta(min_length=1, max_length=MOST_INPUTS)]
    top_n: PositiveInt | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    user: ShortText | None = None
    service_tier: ShortText | None = None
    priority: int | float | str | None = None


class VectorsUsage(Struct, frozen=True, kw_only=True):
    """Nothing is generated, so the two are equal."""

    prompt_tokens: int
    total_tokens: int


class RerankResult(Struct, frozen=True, kw_only=True):
    """One document's place in the ranking; `index` is its place in the request."""

    index: int
    relevance_score: float
    document: DocumentObject | UnsetType = UNSET


class RerankTokens(Struct, frozen=True, kw_only=True):
    """In Cohere's words."""

    input_tokens: int
    output_tokens: int = 0


class RerankMeta(Struct, frozen=True, kw_only=True):
    """Where Cohere's clients look for the usage."""

    tokens: RerankTokens


class RerankAnswer(Struct, frozen=True, kw_only=True):
    """A ranking, best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: VectorsUsage
    meta: RerankMeta
    mlxd: DetailsObject | UnsetType = UNSET
