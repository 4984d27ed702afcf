"""The routes that take bodies, each with some that it answers: what `bodies` changes."""

import itertools
from typing import Any

from msgspec import Struct

from gateway.anthropic.schema import MessagesRequest, PromptRequest
from gateway.cache_terms import WarmChat
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.responses.schema import CountRequest, CreateRequest
from gateway.tokens.schema import DetokenizeRequest, TokenizeChat, TokenizeText
from gateway.vectors.schema import EmbeddingRequest, RerankRequest
from tests.fuzz.bodies import Route

MODEL = "script"
_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]}
_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": _SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
_TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "weather"}, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "user", "content": "SC04"},
]
_BEGUN = {"role": "assistant", "content": "It is"}


def _chat(said: str = "SC04", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": said}], "max_tokens": 12, **fields}


def _names(*types: type[Struct]) -> tuple[str, ...]:
    """Of the fields of these bodies, without those that only make an answer long."""
    fields = set(itertools.chain.from_iterable(kind.__struct_fields__ for kind in types))
    return tuple(sorted(fields - {"max_tokens", "max_completion_tokens", "max_output_tokens", "ignore_eos", "pin"}))


CHAT = Route(
    path="/v1/chat/completions",
    good=(
        _chat(),
        _chat(stream=True, stream_options={"include_usage": True}, temperature=0.5, seed=3, stop=["x"]),
        _chat("SC09", tools=_TOOLS, tool_choice="auto", parallel_tool_calls=False, stream=True),
        _chat("SC08", tools=_TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}),
        _chat("hello", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}),
        _chat("hello", guided_choice=["yes", "no"], stream=True, logprobs=True, top_logprobs=2),
        _chat("hello", structured_outputs={"regex": "a{1,3}"}, n=2),
        _chat("hello", grammar='root ::= "yes" | "no"', stream=True),
        _chat("SC15", reasoning_effort="low", include_reasoning=True, chat_template_kwargs={"enable_thinking": True}),
        {**_chat(), "messages": _TURNS, "tools": _TOOLS},
        {
            **_chat(),
            "messages": [*_TURNS[:-1], {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
        },
        _chat("SC08", functions=[tool["function"] for tool in _TOOLS], function_call={"name": "get_time"}),
        _chat(logit_bias={"5": -100}, top_p=0.5, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1),
    ),
    names=_names(ChatRequest),
)
COMPLETIONS = Route(
    path="/v1/completions",
    good=(
        {"model": MODEL, "prompt": "<|SC04|>", "max_tokens": 12},
        {"model": MODEL, "prompt": ["<|SC04|>", "<|SC01|>"], "n": 2, "echo": True, "max_tokens": 12, "stream": True},
        {"model": MODEL, "prompt": [[1, 2], [3]], "logprobs": 2, "max_tokens": 12, "stream": True},
        {"model": MODEL, "prompt": "a", "suffix": "b", "max_tokens": 12, "guided_json": _SCHEMA},
    ),
    names=_names(CompletionRequest),
)
EMBEDDINGS = Route(
    path="/v1/embeddings",
    good=({"model": MODEL, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4},),
    names=_names(EmbeddingRequest),
)
RERANK = Route(
    path="/v1/rerank",
    good=({"model": MODEL, "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},),
    names=_names(RerankRequest),
)
TOKENIZE = Route(
    path="/tokenize",
    good=({"model": MODEL, "prompt": "hello"}, {"model": MODEL, "messages": _TURNS, "tools": _TOOLS}),
    names=_names(TokenizeText, TokenizeChat),
)
DETOKENIZE = Route(path="/detokenize", good=({"model": MODEL, "tokens": [1, 2, 300]},), names=_names(DetokenizeRequest))
WARM = Route(
    path="/v1/cache/warm",
    good=({"model": MODEL, "messages": _TURNS, "tools": _TOOLS}, {"model": MODEL, "prompt": "abc"}),
    names=_names(WarmChat),
)

_MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "SC04"}], "max_tokens": 12}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]},
]
_CUSTOM = [{"name": "get_weather", "description": "d", "input_schema": _SCHEMA}]
MESSAGES = Route(
    path="/v1/messages?beta=true",
    good=(
        _MESSAGES,
        {**_MESSAGES, "stream": True, "system": [{"type": "text", "text": "be brief"}], "stop_sequences": ["x"]},
        {**_MESSAGES, "messages": _BLOCKS, "tools": _CUSTOM, "tool_choice": {"type": "auto"}, "stream": True},
        {**_MESSAGES, "tools": _CUSTOM, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {**_MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}, "effort": "low"}},
        {**_MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000, "top_k": 5},
        {**_MESSAGES, "max_tokens": 0, "diagnostics": {"previous_message_id": None}},
    ),
    names=_names(MessagesRequest),
    dialect="anthropic",
)
COUNT = Route(
    path="/v1/messages/count_tokens",
    good=({"model": MODEL, "messages": _BLOCKS, "tools": _CUSTOM, "system": "be brief"},),
    names=_names(PromptRequest),
    dialect="anthropic",
)

_RESPONSE = {"model": MODEL, "input": "SC04", "max_output_tokens": 12}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    {"type": "message", "role": "user", "content": "SC04"},
]
_FLAT = [
    {"type": "function", "name": "get_weather", "parameters": _SCHEMA, "strict": True},
    {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}},
    {"type": "web_search"},
]
RESPONSES = Route(
    path="/v1/responses",
    good=(
        _RESPONSE,
        {**_RESPONSE, "stream": True, "instructions": "be brief", "store": False, "top_logprobs": 2},
        {**_RESPONSE, "input": _ITEMS, "tools": _FLAT, "tool_choice": "auto", "stream": True},
        {**_RESPONSE, "input": "SC09", "tools": _FLAT, "parallel_tool_calls": False, "stream": True},
        {**_RESPONSE, "tools": _FLAT, "tool_choice": {"type": "function", "name": "get_weather"}},
        {**_RESPONSE, "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
        {**_RESPONSE, "input": "SC15", "reasoning": {"effort": "low", "summary": "auto"}, "stream": True},
        {**_RESPONSE, "prompt_cache_options": {"mode": "implicit", "prewarm": True}, "metadata": {"a": "b"}},
    ),
    # those in the background go on behind their answers
    names=tuple(name for name in _names(CreateRequest) if name != "background"),
    dialect="responses",
)
INPUT_TOKENS = Route(
    path="/v1/responses/input_tokens",
    good=({"model": MODEL, "input": _ITEMS, "tools": _FLAT, "instructions": "be brief"},),
    names=_names(CountRequest),
    dialect="responses",
)

ROUTES = (CHAT, COMPLETIONS, MESSAGES, COUNT, RESPONSES, INPUT_TOKENS, EMBEDDINGS, RERANK, TOKENIZE, DETOKENIZE, WARM)
"""Chat is drawn most: most lies behind it."""
