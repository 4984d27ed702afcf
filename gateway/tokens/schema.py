"""What clients send to the tokenize and detokenize routes, and what they get, field by field."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.openai.schema import ChatRequest, ModelId, TokenId


class PromptFields(Struct, frozen=True, kw_only=True):
    """Which of the two bodies of /tokenize it is."""

    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET


class TokenizeText(Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize with a text. Special tokens are added as for a completion, unless told not to."""

    model: ModelId
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatRequest, frozen=True, kw_only=True):
    """Likewise with messages: any chat request will do, and its tokens are those that an answer would begin from."""

    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: Any = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    model: ModelId
    tokens: Annotated[list[TokenId], Meta(max_length=2**22)]


class TokenizeAnswer(Struct, frozen=True, kw_only=True):
    """`token_strs` are the tokens as the vocabulary spells them, for who asked."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None


class DetokenizeAnswer(Struct, frozen=True, kw_only=True):
    """The text, special tokens included."""

    prompt: str
