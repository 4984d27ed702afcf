"""How many tokens an answer may think, in the spellings of the field. Pure."""

from collections.abc import Mapping
from typing import Any

from gateway.openai.refusals import invalid
from gateway.openai.schema import ChatRequest

UNBOUNDED = 2**31 - 1
"""More than any answer has: what a client says that wants no bound, against a profile that has one."""

_IN_TEMPLATE = "thinking_budget"


def asked_budget(request: ChatRequest) -> int | None:
    """Of a chat: oMLX's and Qwen's name for it, vLLM's, and llama-server's two, or the one that a template may know.
    None: nothing is said. Raises Refusal."""
    said = {
        "thinking_budget": request.thinking_budget,
        "thinking_token_budget": request.thinking_token_budget,
        "thinking_budget_tokens": request.thinking_budget_tokens,
        "reasoning_budget": request.reasoning_budget,
    }
    budgets = {field: _bound(field, value) for field, value in said.items() if value is not None}
    in_template = budget_in_template(request.chat_template_kwargs)
    if in_template is not None:
        budgets[f"chat_template_kwargs.{_IN_TEMPLATE}"] = in_template
    if len(set(budgets.values())) > 1:
        raise invalid(next(iter(budgets)), f"differs from {', '.join(list(budgets)[1:])}. Send one of them.")
    return next(iter(budgets.values()), None)


def budget_in_template(arguments: Mapping[str, Any] | None) -> int | None:
    """What is said to the template itself: most know no such variable, and those that do only tell the model of it."""
    value = (arguments or {}).get(_IN_TEMPLATE)
    return None if value is None else _bound(f"chat_template_kwargs.{_IN_TEMPLATE}", value)


def _bound(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise invalid(field, "must be a number of tokens; 0 is no thinking, and -1 no bound. Correct it.")
    return UNBOUNDED if value == -1 else min(value, UNBOUNDED)
