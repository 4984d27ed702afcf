"""How a family of models writes a call whose arguments are one JSON object: enough to write a grammar from. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """A whole answer of calls is `section_start`, calls joined by `separator`, `section_end`.

    One call is `before_name`, the name, `before_arguments`, the arguments as a JSON object, `after_arguments`.
    `markers` are the pieces of these texts that a vocabulary may hold as one token of its own: where it does, the model
    writes that token. `max_calls` None: any number.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str = ""
    section_start: str = ""
    section_end: str = ""
    markers: tuple[str, ...] = ()
    max_calls: int | None = None


HERMES = CallSyntax(
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n</tool_call>",
    separator="\n",
    markers=("<tool_call>", "</tool_call>"),
)
"""Qwen2.5, Qwen3, Hermes, Granite 4, and every model that is told how by our own system text."""


def json_between(opens: str, closes: str) -> CallSyntax:
    """One call as JSON, for a family that writes something else between its markers but is read in JSON as well."""
    return CallSyntax(
        before_name=f'{opens}{{"name": "',
        before_arguments='", "arguments": ',
        after_arguments=f"}}{closes}",
        separator="\n",
        markers=(opens, closes),
    )


MISTRAL_LIST = CallSyntax(
    section_start="[TOOL_CALLS][",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator=", ",
    section_end="]",
    markers=("[TOOL_CALLS]",),
)
"""Mistral until the tokenizer of version 7, Nemo, Mixtral."""

MISTRAL_NAMED = CallSyntax(
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_arguments="",
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
"""Mistral from the tokenizer of version 11 on: Small 3.2, Magistral, Devstral, Ministral 3."""

LLAMA = CallSyntax(before_name='{"name": "', before_arguments='", "parameters": ', after_arguments="}", separator="; ")
"""Llama 3.1 to 3.3."""

DEEPSEEK_V3 = CallSyntax(
    section_start="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    after_arguments="\n```<｜tool▁call▁end｜>",
    separator="\n",
    section_end="<｜tool▁calls▁end｜>",
    markers=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)
"""DeepSeek V3 and R1."""

DEEPSEEK_V31 = CallSyntax(
    section_start="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
    markers=DEEPSEEK_V3.markers,
)
"""DeepSeek V3.1 and V3.2-Exp."""

GRANITE_LIST = CallSyntax(
    section_start="<|tool_call|>[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator=", ",
    section_end="]",
    markers=("<|tool_call|>",),
)
"""Granite 3."""

PHI = CallSyntax(
    section_start="<|tool_call|>[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator=", ",
    section_end="]<|/tool_call|>",
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
"""Phi-4-mini."""

KIMI_K2 = CallSyntax(
    section_start="<|tool_calls_section_begin|>",
    before_name="<|tool_call_begin|>functions.",
    before_arguments=":0<|tool_call_argument_begin|>",
    after_arguments="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    max_calls=1,
)
"""Kimi K2. It numbers its calls, which this text cannot: one call only."""

HARMONY = CallSyntax(
    before_name="<|channel|>commentary to=functions.",
    before_arguments=" <|constrain|>json<|message|>",
    after_arguments="<|call|>",
    markers=("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    max_calls=1,
)
"""gpt-oss. `<|call|>` ends its turn."""

COMMAND = CallSyntax(
    section_start="<|START_ACTION|>[",
    before_name='{"tool_name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    separator=", ",
    section_end="]<|END_ACTION|>",
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
)
"""Command R7B and Command A."""

GIGACHAT = CallSyntax(
    before_name='<|function_call|>{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    markers=("<|function_call|>",),
)

FUNCTIONARY = CallSyntax(before_name="<function=", before_arguments=">", after_arguments="</function>")
"""Functionary 3.1."""

SOLAR = CallSyntax(
    section_start="<|tool_calls|>",
    before_name="<|tool_call:begin|>0<|tool_call:name|>",
    before_arguments="<|tool_call:args|>",
    after_arguments="<|tool_call:end|>",
    section_end="<|calls|>",
    markers=(
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        "<|calls|>",
    ),
    max_calls=1,
)
"""Solar Open. Each call has an id of the model's making, which this text cannot: one call only."""

COMMAND_R = CallSyntax(
    section_start="Action: ```json\n[",
    before_name='{"tool_name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    separator=", ",
    section_end="]\n```",
)
"""Command-R and R+ of 2024."""
