"""POST /tokenize and /detokenize, below /v1 too."""

from litestar import Router, post
from litestar.types import ASGIApp

from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.single_answers import SingleAnswers
from gateway.tokens.tokenize import Detokenizing, Tokenizing


def tokens_router(answers: SingleAnswers) -> Router:
    """The routes."""
    tokenize_app, detokenize_app = answers.app(Tokenizing()), answers.app(Detokenizing())

    @post(["/tokenize", "/v1/tokenize"], status_code=200)
    async def tokenize() -> ASGIApp:
        """Text or chat → tokens."""
        return tokenize_app

    @post(["/detokenize", "/v1/detokenize"], status_code=200)
    async def detokenize() -> ASGIApp:
        """Tokens → text."""
        return detokenize_app

    return Router("/", route_handlers=[tokenize, detokenize], exception_handlers=OPENAI_EXCEPTION_HANDLERS)
