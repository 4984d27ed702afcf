"""A request's prompt → token ids, through the model's own chat template and tokenizer.

Runs on the text thread: a long prompt takes long to tokenize, and a template is the model author's code.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jinja2
from tokenizers import Tokenizer

from protocol.failures import Failure, FailureKind
from protocol.generation import ChatMessage, ChatPrompt, Generate, Prompt, TextPrompt, TokenPrompt
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS

STATE_EVERY_BLOCKS = 8
"""A model whose layers cannot all be cut keeps a state at least this often in a long prompt: 2,048 tokens."""

RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "chat_template", "tools", "documents"),
        *("tokenizer", "tokenizer_kwargs", "tokenize", "padding", "truncation", "max_length"),
        *("add_generation_prompt", "continue_final_message"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""Arguments that would replace what the request itself says; a client may not set them."""


class PromptTokenizer(Protocol):
    """What mlx-lm's TokenizerWrapper offers."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_template(self) -> Any: ...


class PromptRefused(Exception):
    """This prompt cannot be given to this model."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class PromptTokens(NamedTuple):
    """A prompt's tokens. `message_starts` and `message_ends` are the positions of each message's text in them; empty
    when a template changed some text, so that it was not found."""

    token_ids: list[int]
    message_starts: tuple[int, ...] = ()
    message_ends: tuple[int, ...] = ()


def prompt_tokens(tokenizer: PromptTokenizer, prompt: Prompt, vocabulary_size: int) -> PromptTokens:
    """The prompt's tokens, at least one. Raises PromptRefused."""
    match prompt:
        case ChatPrompt():
            tokens = _chat_tokens(tokenizer, render_chat(tokenizer, prompt), prompt)
        case TextPrompt(text=text):
            tokens = PromptTokens(tokenizer.encode(text))
        case TokenPrompt(token_ids=given):
            bad = next((token for token in given if not 0 <= token < vocabulary_size), None)
            if bad is not None:
                raise _refused(f"token id {bad} is outside the model's vocabulary of {vocabulary_size}", "prompt")
            tokens = PromptTokens(list(given))
    if not tokens.token_ids:
        raise _refused("the prompt holds no token; send at least one character", "prompt")
    return tokens


def boundaries(tokens: PromptTokens, prompt: Prompt) -> tuple[int, ...]:
    """Positions where a later prompt is likely to part from this one, ascending, on the grain grid.

    The end of the system prompt, the end of the last turn, and every STATE_EVERY_BLOCKS blocks.
    """
    length = len(tokens.token_ids) - 1
    wanted = set(range(STATE_EVERY_BLOCKS * BLOCK_TOKENS, length + 1, STATE_EVERY_BLOCKS * BLOCK_TOKENS))
    if isinstance(prompt, ChatPrompt) and tokens.message_starts:
        roles = [message.role for message in prompt.messages]
        after_system = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), None)
        if after_system:
            wanted.add(tokens.message_starts[after_system])
        wanted.add(tokens.message_ends[-1])
    else:
        wanted.add(length)
    on_grid = {position // GRAIN_TOKENS * GRAIN_TOKENS for position in wanted if position <= length}
    return tuple(sorted(on_grid - {0}))


def _chat_tokens(tokenizer: PromptTokenizer, text: str, prompt: ChatPrompt) -> PromptTokens:
    # The template writes the special tokens itself; adding them again would double the first one.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return PromptTokens(tokenizer.encode(text, add_special_tokens=False))
    encoding = backend.encode(text, add_special_tokens=False)
    spans = _message_spans(text, prompt.messages)
    begins = [begin for begin, _ in encoding.offsets]
    return PromptTokens(
        encoding.ids,
        tuple(bisect_left(begins, begin) for begin, _ in spans),
        tuple(bisect_left(begins, end) for _, end in spans),
    )


def _message_spans(text: str, messages: Sequence[ChatMessage]) -> list[tuple[int, int]]:
    """Where each message's text stands in the rendered prompt, in characters; empty if one is not found in order."""
    spans: list[tuple[int, int]] = []
    cursor = 0
    for message in messages:
        content = message.content.strip()
        begin = text.find(content, cursor)
        if begin < 0:
            return []
        cursor = begin + len(content)
        spans.append((begin, cursor))
    return spans


def resolve_max_tokens(request: Generate, prompt_tokens: int, context_tokens: int) -> int:
    """How many tokens the row may draw: what was asked, clipped to the context left. Raises PromptRefused."""
    if prompt_tokens >= context_tokens:
        raise PromptRefused(
            Failure(
                kind=FailureKind.CONTEXT_LENGTH_EXCEEDED,
                message=f"the prompt has {prompt_tokens} tokens and this model's context is {context_tokens}; "
                "shorten the prompt",
                param="messages" if isinstance(request.prompt, ChatPrompt) else "prompt",
            )
        )
    left = context_tokens - prompt_tokens
    return left if request.max_tokens is None else min(request.max_tokens, left)


def render_chat(tokenizer: PromptTokenizer, prompt: ChatPrompt) -> str:
    """The template's text, ending where the assistant's answer begins. Raises PromptRefused.

    The messages are tried as they are. Many templates raise on a system message that is not the first, or drop it;
    then such messages are folded into the user turn that follows, so that every earlier token stays what it was
    (hoisting them to the front would change the whole prefix at each turn).
    """
    if not tokenizer.has_chat_template:
        raise _refused("this model has no chat template; use /v1/completions", "messages")
    reserved = sorted(RESERVED_TEMPLATE_ARGUMENTS & prompt.template_arguments.keys())
    if reserved:
        raise _refused(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")
    messages = prompt.messages
    if "developer" not in str(tokenizer.chat_template):
        messages = tuple(_as_system(message) for message in messages)
    reasons: list[str] = []
    for attempt in (messages, fold_system_messages(messages)):
        try:
            text = _apply(tokenizer, attempt, prompt.template_arguments)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as why:
            reasons.append(str(why))
            continue
        lost = _lost_instruction(attempt, text)
        if lost is None:
            return text
        reasons.append(f"the model's chat template drops messages[{lost}]")
    raise _refused(f"the model's chat template refused the messages: {reasons[0]}", "messages")


def fold_system_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Leading system messages become one; later ones go into the user message that follows (or end the one before)."""
    leading: list[str] = []
    folded: list[ChatMessage] = []
    notes: list[str] = []
    for message in messages:
        if message.role in ("system", "developer"):
            (notes if folded else leading).append(message.content)
        elif message.role == "user" and notes:
            folded.append(_with_content(message, "\n\n".join([*notes, message.content])))
            notes = []
        else:
            folded.append(message)
    if notes:
        last_user = next((i for i in reversed(range(len(folded))) if folded[i].role == "user"), None)
        if last_user is None:
            folded.append(ChatMessage(role="user", content="\n\n".join(notes)))
        else:
            folded[last_user] = _with_content(folded[last_user], "\n\n".join([folded[last_user].content, *notes]))
    if leading:
        folded.insert(0, ChatMessage(role="system", content="\n\n".join(leading)))
    return tuple(folded)


def _apply(tokenizer: PromptTokenizer, messages: Sequence[ChatMessage], arguments: dict[str, Any]) -> str:
    conversation = [_template_message(message) for message in messages]
    return tokenizer.apply_chat_template(
        conversation, **{**arguments, "tokenize": False, "add_generation_prompt": True}
    )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _lost_instruction(messages: Sequence[ChatMessage], text: str) -> int | None:
    """The index of a system message whose text is not in the rendered prompt."""
    for index, message in enumerate(messages):
        if message.role in ("system", "developer") and message.content.strip() not in text:
            return index
    return None


def _as_system(message: ChatMessage) -> ChatMessage:
    if message.role != "developer":
        return message
    return ChatMessage(role="system", content=message.content, name=message.name)


def _with_content(message: ChatMessage, content: str) -> ChatMessage:
    return ChatMessage(role=message.role, content=content, name=message.name)


def _refused(message: str, param: str) -> PromptRefused:
    return PromptRefused(Failure(kind=FailureKind.INVALID_REQUEST, message=message, param=param))
