"""How families of code models want to be asked for what stands between two texts. Pure."""

from collections.abc import Callable

from msgspec import Struct


class _Form(Struct, frozen=True, kw_only=True):
    """`markers` are tokens that a model of this family has; `template` puts them around `before` and `after`."""

    markers: tuple[str, ...]
    template: str


_FORMS = (
    # Qwen Coder, CodeGemma
    _Form(
        markers=("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        template="<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
    ),
    # StarCoder, Granite
    _Form(
        markers=("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        template="<fim_prefix>{before}<fim_suffix>{after}<fim_middle>",
    ),
    # DeepSeek Coder
    _Form(
        markers=("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        template="<｜fim▁begin｜>{before}<｜fim▁hole｜>{after}<｜fim▁end｜>",
    ),
    # GLM
    _Form(
        markers=("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
        template="<|code_prefix|>{before}<|code_suffix|>{after}<|code_middle|>",
    ),
    # Codestral
    _Form(markers=("[PREFIX]", "[SUFFIX]"), template="[SUFFIX]{after}[PREFIX]{before}"),
)


def fill_in_text(token_id: Callable[[str], int | None], before: str, after: str) -> str | None:
    """The prompt in the words of the family whose markers this tokenizer knows; None if it knows none's."""
    for form in _FORMS:
        if all(token_id(marker) is not None for marker in form.markers):
            return form.template.format(before=before, after=after)
    return None
