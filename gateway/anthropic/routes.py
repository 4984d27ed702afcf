"""POST /v1/messages and /v1/messages/count_tokens."""

import secrets

from litestar import Router, post
from litestar.types import ASGIApp

from gateway.answering import Answering
from gateway.anthropic.counting import CountingTokens
from gateway.anthropic.dialect import Comparing, MessagesDialect
from gateway.anthropic_errors import anthropic_error
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.single_answers import SingleAnswers


def anthropic_router(
    answering: Answering,
    single_answers: SingleAnswers,
    *,
    earlier: Comparing | None,
) -> Router:
    """The routes of Anthropic's API. `earlier` remembers prompts for cache diagnostics."""
    dialect = MessagesDialect(secret=secrets.token_bytes(32), earlier=earlier)

    @post("/", status_code=200)
    async def messages() -> ASGIApp:
        """Anthropic Messages."""
        return answering.app(dialect)

    @post("/count_tokens", status_code=200)
    async def count_tokens() -> ASGIApp:
        """How many tokens a prompt has."""
        return single_answers.app(CountingTokens(), error=anthropic_error)

    return Router("/v1/messages", route_handlers=[messages, count_tokens], exception_handlers=OPENAI_EXCEPTION_HANDLERS)
