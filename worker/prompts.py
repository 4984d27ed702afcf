"""A request's prompt → token ids, through the model's own chat template and tokenizer.

Runs on the text thread: a long prompt takes long to tokenize, and a template is the model author's code.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jinja2
from tokenizers import Tokenizer

from protocol.failures import Failure, FailureKind
from protocol.generation import ChatMessage, ChatPrompt, Generate, Prompt, TextPrompt, TokenPrompt
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS
from worker.answers.call_syntax import CallSyntax
from worker.answers.openai_tools import openai_tool
from worker.conversations import Conversation, ToldBy, conversations
from worker.fill_in import fill_in_text
from worker.template_messages import lost_call, template_messages, ways

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


Tail = Literal["wanted", "unwanted"]
"""Whether to find out what of a prompt the template put behind the last message: that takes a second rendering."""


class Rendered(NamedTuple):
    """A chat as text. `tail` is what the template put behind the last message; empty where that was not wanted."""

    text: str
    tail: str = ""
    told_by: ToldBy = "template"


class PromptTokens(NamedTuple):
    """A prompt's tokens. `message_starts` and `message_ends` are the positions of each message's text in them; empty
    when a template changed some text, so that it was not found. `tail` and `told_by` are those of `Rendered`."""

    token_ids: list[int]
    message_starts: tuple[int, ...] = ()
    message_ends: tuple[int, ...] = ()
    tail: str = ""
    told_by: ToldBy = "template"


def prompt_tokens(
    tokenizer: PromptTokenizer,
    prompt: Prompt,
    vocabulary_size: int,
    tail: Tail = "unwanted",
    syntax: CallSyntax | None = None,
) -> PromptTokens:
    """The prompt's tokens, at least one. Raises PromptRefused."""
    match prompt:
        case ChatPrompt():
            rendered = render_chat(tokenizer, prompt, tail, syntax)
            tokens = _chat_tokens(tokenizer, rendered.text, prompt)
            tokens = tokens._replace(tail=rendered.tail, told_by=rendered.told_by)
        case TextPrompt(text=text, suffix=""):
            tokens = PromptTokens(tokenizer.encode(text))
        case TextPrompt(text=before, suffix=after):
            tokens = PromptTokens(tokenizer.encode(_fill_in(tokenizer, before, after)))
        case TokenPrompt(token_ids=given):
            bad = next((token for token in given if not 0 <= token < vocabulary_size), None)
            if bad is not None:
                raise _refused(f"token id {bad} is outside the model's vocabulary of {vocabulary_size}", "prompt")
            tokens = PromptTokens(list(given))
    if not tokens.token_ids:
        raise _refused("the prompt holds no token; send at least one character", "prompt")
    return tokens


def _fill_in(tokenizer: PromptTokenizer, before: str, after: str) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = fill_in_text(backend.token_to_id, before, after) if isinstance(backend, Tokenizer) else None
    if text is None:
        message = "this model has no tokens to fill in code between a prompt and a suffix; leave the suffix out"
        raise PromptRefused(Failure(kind=FailureKind.UNSUPPORTED, message=message, param="suffix"))
    return text


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


def resolve_max_tokens(
    request: Generate, prompt_tokens: int, context_tokens: int, row_tokens: int | None = None
) -> int:
    """How many tokens the row may draw: what was asked, clipped to the context left, and to the `row_tokens` whose KV
    there is memory for. Raises PromptRefused."""
    param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    if prompt_tokens >= context_tokens:
        raise PromptRefused(
            Failure(
                kind=FailureKind.CONTEXT_LENGTH_EXCEEDED,
                message=f"the prompt has {prompt_tokens} tokens and this model's context is {context_tokens}; "
                "shorten the prompt",
                param=param,
            )
        )
    if row_tokens is not None and prompt_tokens >= row_tokens:
        raise PromptRefused(
            Failure(
                kind=FailureKind.CONTEXT_LENGTH_EXCEEDED,
                message=f"the prompt has {prompt_tokens} tokens and there is memory for {row_tokens} of one request, "
                "prompt and answer together; shorten the prompt, or ask the operator to raise [worker] live_kv",
                param=param,
            )
        )
    left = min(context_tokens, context_tokens if row_tokens is None else row_tokens) - prompt_tokens
    return left if request.max_tokens is None else min(request.max_tokens, left)


def render_chat(
    tokenizer: PromptTokenizer, prompt: ChatPrompt, tail: Tail = "unwanted", syntax: CallSyntax | None = None
) -> Rendered:
    """The template's text, ending where the assistant's answer begins, or goes on. Raises PromptRefused.

    The messages are tried as they are, then in other words (see `conversations`), until the template takes them and
    loses none of them. `syntax` is how this model writes a call, for a template that drops those of the past.
    """
    if not tokenizer.has_chat_template:
        raise _refused("this model has no chat template; use /v1/completions", "messages")
    reserved = sorted(RESERVED_TEMPLATE_ARGUMENTS & prompt.template_arguments.keys())
    if reserved:
        raise _refused(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")
    if prompt.ending == "continue" and prompt.messages[-1:] and prompt.messages[-1].role != "assistant":
        raise _refused("only an assistant message can be continued, and the last one is none", "messages")
    source = str(tokenizer.chat_template)
    reasons: list[str] = []
    for conversation in conversations(prompt.messages, prompt.tools, source, syntax):
        for way in ways(conversation.messages):
            messages = template_messages(conversation.messages, way, source)
            try:
                return _rendered(tokenizer, prompt, conversation, messages, tail)
            except (_Lost, *_TEMPLATE_FAILURES) as why:
                reasons.append(str(why))
    raise _refused(f"the model's chat template refused the messages: {reasons[0]}", "messages")


_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class _Lost(Exception):
    """A template dropped something of the conversation."""


def _rendered(
    tokenizer: PromptTokenizer,
    prompt: ChatPrompt,
    conversation: Conversation,
    messages: list[dict[str, Any]],
    tail: Tail,
) -> Rendered:
    """One way to say it. Raises _Lost, PromptRefused, or whatever the template does."""
    generation_prompt = "no" if prompt.ending == "continue" else "yes"
    text = _apply(tokenizer, messages, prompt, conversation.told_by, generation_prompt)
    lost = _lost(conversation, text, prompt)
    if lost:
        raise _Lost(lost)
    if prompt.ending == "continue":
        return _left_open(text, conversation)
    if tail == "unwanted":
        return Rendered(text, "", conversation.told_by)
    without = _apply(tokenizer, messages, prompt, conversation.told_by, "no")
    return Rendered(text, _behind(without, text), conversation.told_by)


def _behind(without: str, text: str) -> str:
    """What `text` has more than `without`, from the tag on in which they part."""
    low, high = 0, min(len(without), len(text))
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(without[:middle]):
            low = middle
        else:
            high = middle - 1
    opened = text.rfind("<", 0, low)
    return text[opened:] if opened >= 0 and ">" not in text[opened:low] and low - opened < _TAG else text[low:]


_TAG = 32
"""No tag is longer."""


def _left_open(text: str, conversation: Conversation) -> Rendered:
    """The text up to the end of its last message, whose own text decides whether it goes on thinking."""
    content = conversation.messages[-1].content.rstrip()
    at = text.rfind(content)
    if not content or at < 0:
        raise _refused("the model's chat template changes the last message, so it cannot be continued", "messages")
    return Rendered(text[: at + len(content)], content, conversation.told_by)


def _lost(conversation: Conversation, text: str, prompt: ChatPrompt) -> str:
    """What the template dropped; empty if nothing."""
    lost = _lost_instruction(conversation.messages, text)
    if lost is not None:
        return f"the model's chat template drops messages[{lost}]"
    lost = lost_call(conversation.messages, text)
    if lost is not None:
        return f"the model's chat template drops the tool calls of messages[{lost}]"
    if conversation.told_by == "template" and any(tool.name not in text for tool in prompt.tools):
        return "the model's chat template drops the tools"
    return ""


def _apply(
    tokenizer: PromptTokenizer,
    conversation: list[dict[str, Any]],
    prompt: ChatPrompt,
    told_by: ToldBy,
    generation_prompt: Literal["yes", "no"],
) -> str:
    arguments = {**prompt.template_arguments, "tokenize": False, "add_generation_prompt": generation_prompt == "yes"}
    if prompt.tools and told_by == "template":
        arguments["tools"] = [openai_tool(tool) for tool in prompt.tools]
    return tokenizer.apply_chat_template(conversation, **arguments)


def _lost_instruction(messages: Sequence[ChatMessage], text: str) -> int | None:
    """The index of a system message whose text is not in the rendered prompt."""
    for index, message in enumerate(messages):
        if message.role in ("system", "developer") and message.content.strip() not in text:
            return index
    return None


def _refused(message: str, param: str) -> PromptRefused:
    return PromptRefused(Failure(kind=FailureKind.INVALID_REQUEST, message=message, param=param))
