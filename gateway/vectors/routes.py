"""POST /v1/embeddings; POST /rerank, below /v1 and /v2 too, since its clients differ in where they look for it."""

from litestar import Router, post
from litestar.types import ASGIApp

from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.single_answers import SingleAnswers
from gateway.vectors.embeddings import Embeddings
from gateway.vectors.rerank import Ranking


def vectors_router(answers: SingleAnswers) -> Router:
    """The routes."""
    embeddings_app, rerank_app = answers.app(Embeddings()), answers.app(Ranking())

    @post("/v1/embeddings", status_code=200)
    async def embeddings() -> ASGIApp:
        """OpenAI's embeddings."""
        return embeddings_app

    @post(["/v1/rerank", "/v2/rerank", "/rerank"], status_code=200)
    async def rerank() -> ASGIApp:
        """Jina's and Cohere's rerank."""
        return rerank_app

    return Router("/", route_handlers=[embeddings, rerank], exception_handlers=OPENAI_EXCEPTION_HANDLERS)
