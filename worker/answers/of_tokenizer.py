"""What mlx-lm's tokenizer tells of the formats that its model writes. Pure."""

from typing import Any

from worker.answers.plan import AnswerFormats, formats_of


def formats_of_tokenizer(tokenizer: Any) -> AnswerFormats:
    """`tokenizer` is mlx-lm's TokenizerWrapper."""
    kwargs = tokenizer.init_kwargs
    template = f"{tokenizer.chat_template or ''}"
    if kwargs.get("chat_template_type") == "deepseek_v32":
        template = "<｜DSML｜ <think> </think>"  # mlx-lm renders it with code of its own, which has no text to look at
    return formats_of(
        template=template,
        vocabulary=tokenizer.get_vocab(),
        tool_parser_type=kwargs.get("tool_parser_type"),
        foreign_parser=tokenizer.tool_parser,
        foreign_opens=tokenizer.tool_call_start,
        foreign_closes=tokenizer.tool_call_end,
    )
