"""One set of weights under many names, each with its own defaults: a request's overlay, never a reload. Pure.

A profile's name is a model id of its own, or a pattern with one `*`, for clients that ask for names nobody serves here
(`claude-*`, `gpt-*`). A model folder of the same name comes first, then a profile of exactly this name, then the
longest pattern. What a profile stands for is always a folder, so that no name leads in a circle.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, assert_never

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from protocol.generation import (
    ChatMessage,
    ChatPrompt,
    Check,
    Detokenize,
    Embed,
    Generate,
    Prompt,
    Rerank,
    Tokenize,
    Warm,
    Work,
)
from protocol.ids import ModelName
from protocol.latency import LatencyClass
from protocol.sampling import Sampling

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class ProfileSampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands where a request says nothing, or what its API takes for granted (a temperature of 1)."""

    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class Profile(ProfileSampling, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={
    "latency_class": "class",
}):  # fmt: skip
    """`model` is the folder's name. `system` comes before the request's own system text. `latency_class` is asked for
    if the request asks for none; the key has the last word. `template_arguments` are those that a request may send as
    `chat_template_kwargs`, which win. `thinking_budget` is for a chat that names none."""

    model: Annotated[str, Meta(min_length=1)]
    system: str = ""
    latency_class: Literal["interactive", "standard", "batch"] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    thinking_budget: Annotated[int, Meta(ge=1)] | None = None
    template_arguments: dict[str, Any] = {}


Profiles = Mapping[str, Profile]
NO_PROFILES: Profiles = MappingProxyType({})
_NO_SAMPLING = asdict(Sampling())


def profile_of(profiles: Profiles, name: str, is_folder: Callable[[str], bool]) -> Profile | None:
    """What this name stands for; None if it is a folder's, or nobody's."""
    if not profiles or is_folder(name):
        return None
    if name in profiles:
        return profiles[name]
    fitting = [pattern for pattern in profiles if _fits(pattern, name)]
    return profiles[max(fitting, key=len)] if fitting else None


def listed_names(profiles: Profiles, folders: Sequence[ModelName]) -> tuple[tuple[ModelName, ModelName], ...]:
    """Names to show beside the folders', each with the folder that it stands for.

    A pattern shows one name that fits it, made of the folder's: clients that choose from a list must find one.
    """
    known = set(folders)
    names: dict[ModelName, ModelName] = {}
    for name, profile in profiles.items():
        folder = ModelName(profile.model)
        shown = ModelName(name.replace("*", profile.model.rpartition("/")[2]))
        if folder in known and shown not in known:
            names.setdefault(shown, folder)
    return tuple(names.items())


def profiled(profile: Profile, work: Work) -> Work:
    """The same work as this profile has it done."""
    match work:
        case Generate():
            return _generated(profile, work, _prompt(profile, work.prompt))
        case Warm() | Tokenize():
            return replace(work, prompt=_prompt(profile, work.prompt))
        case Check(generate=generate):
            return replace(work, generate=_generated(profile, generate, _prompt(profile, generate.prompt)))
        case Detokenize() | Embed() | Rerank():
            return work
        case _:
            assert_never(work)


def profiled_choices(profile: Profile, work: Sequence[Generate | Warm]) -> tuple[Generate | Warm, ...]:
    """The same for all choices of a request. Those that share a prompt, the very same object, share one again."""
    prompts: dict[int, Prompt] = {}
    made: list[Generate | Warm] = []
    for command in work:
        prompt = prompts.setdefault(id(command.prompt), _prompt(profile, command.prompt))
        if isinstance(command, Generate):
            made.append(_generated(profile, command, prompt))
        else:
            made.append(replace(command, prompt=prompt))
    return tuple(made)


def default_class(profile: Profile | None, otherwise: LatencyClass) -> LatencyClass:
    """The class of a request that asks for none."""
    if profile is None or profile.latency_class is None:
        return otherwise
    return LatencyClass(profile.latency_class)


def name_problem(name: str) -> str | None:
    """Why a profile may not be called so."""
    if not name or not name.isprintable() or len(name) > 128:
        return "must have 1 to 128 printable characters"
    return "may hold one `*` at most" if name.count("*") > 1 else None


def _fits(pattern: str, name: str) -> bool:
    before, star, after = pattern.partition("*")
    return bool(star) and len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after)


def _sampling(profile: Profile, asked: Sampling) -> Sampling:
    own = {name: value for name in ProfileSampling.__struct_fields__ if (value := getattr(profile, name)) is not None}
    unsaid = {name: value for name, value in own.items() if getattr(asked, name) == _NO_SAMPLING[name]}
    return replace(asked, **unsaid)


def _generated(profile: Profile, work: Generate, prompt: Prompt) -> Generate:
    takes_budget = work.reasoning == "split" and work.reasoning_budget_tokens is None
    return replace(
        work,
        prompt=prompt,
        sampling=_sampling(profile, work.sampling),
        max_tokens=profile.max_tokens if work.max_tokens is None else work.max_tokens,
        reasoning_budget_tokens=profile.thinking_budget if takes_budget else work.reasoning_budget_tokens,
    )


def _prompt(profile: Profile, prompt: Prompt) -> Prompt:
    """Only a chat has a system text and a template."""
    if not isinstance(prompt, ChatPrompt):
        return prompt
    messages = prompt.messages
    if profile.system:
        first = messages[0] if messages and messages[0].role in ("system", "developer") else None
        if first is None:
            messages = (ChatMessage(role="system", content=profile.system), *messages)
        else:
            joined = f"{profile.system}\n\n{first.content}" if first.content else profile.system
            messages = (replace(first, content=joined), *messages[1:])
    arguments = {**profile.template_arguments, **prompt.template_arguments}
    return replace(prompt, messages=messages, template_arguments=arguments)
