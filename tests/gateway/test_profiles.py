"""Names that stand for a model folder, and what they change of a request."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.config import SettingsError, settings_from
from gateway.profiles import (
    NO_PROFILES,
    Profile,
    default_class,
    listed_names,
    profile_of,
    profiled,
    profiled_choices,
)
from protocol.generation import ChatMessage, ChatPrompt, Generate, TextPrompt, Tokenize, Warm
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass
from protocol.sampling import Sampling
from tests.fakes.client_model import TALK, TALKED, make_client_model
from tests.fakes.live_service import LiveService, live_service

FOLDER = ModelName("org/big")
PROFILES = {
    "fast": Profile(model=FOLDER, temperature=0.2),
    "claude-*": Profile(model=FOLDER),
    "claude-haiku-*": Profile(model="small"),
    "*": Profile(model="last"),
}


def _is_folder(name: str) -> bool:
    return name in (FOLDER, "small", "claude-real")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("fast", FOLDER),
        ("claude-sonnet-4-5", FOLDER),
        ("claude-haiku-4-5", "small"),
        ("claude-real", None),
        ("gpt-5", "last"),
        ("small", None),
    ],
)
def test_who_a_name_stands_for(name: str, model: str | None) -> None:
    """A folder first, then the very name, then the longest pattern."""
    found = profile_of(PROFILES, name, _is_folder)
    assert (None if found is None else found.model) == model


@given(name=st.text())
def test_without_profiles_no_name_stands_for_another(name: str) -> None:
    assert profile_of(NO_PROFILES, name, lambda _: False) is None


@given(before=st.text(max_size=4), after=st.text(max_size=4), middle=st.text(max_size=4))
def test_a_pattern_fits_what_its_star_may_be(before: str, after: str, middle: str) -> None:
    """Anything, also nothing; and nothing shorter than what stands around it."""
    if "*" in before + after:
        return
    pattern = {f"{before}*{after}": Profile(model="m")}
    assert profile_of(pattern, before + middle + after, lambda _: False) is not None
    shorter = (before + after)[:-1]
    if before + after and len(shorter) < len(before) + len(after):
        assert profile_of(pattern, shorter, lambda _: False) is None


def test_the_list_shows_a_name_for_each_pattern() -> None:
    """One that fits the pattern itself; no name whose folder is not there, and none twice."""
    names = listed_names(PROFILES, (FOLDER, ModelName("small")))
    assert names == (("fast", FOLDER), ("claude-big", FOLDER), ("claude-haiku-small", "small"))
    for shown, folder in names:
        profile = profile_of(PROFILES, shown, _is_folder)
        assert profile is not None
        assert profile.model == folder


CHAT = ChatPrompt(messages=(ChatMessage(role="user", content="hello"),))
WORK = Generate(request_id=RequestId("r"), prompt=CHAT, sampling=Sampling(), max_tokens=None)


def test_a_profile_fills_what_was_not_said() -> None:
    """And leaves what was: a request's own words win."""
    profile = Profile(model=FOLDER, temperature=0.2, top_p=0.9, max_tokens=50, template_arguments={"a": 1, "b": 2})
    filled = profiled(profile, WORK)
    assert isinstance(filled, Generate)
    assert (filled.sampling.temperature, filled.sampling.top_p, filled.max_tokens) == (0.2, 0.9, 50)

    said = replace(
        WORK, sampling=Sampling(temperature=0.7), max_tokens=5, prompt=replace(CHAT, template_arguments={"a": 3})
    )
    kept = profiled(profile, said)
    assert isinstance(kept, Generate)
    assert isinstance(kept.prompt, ChatPrompt)
    assert (kept.sampling.temperature, kept.max_tokens) == (0.7, 5)
    assert kept.prompt.template_arguments == {"a": 3, "b": 2}


def test_a_profiles_thinking_budget() -> None:
    """For a chat that names none, no bound included; a text that nobody splits has no thoughts to bound."""
    profile = Profile(model=FOLDER, thinking_budget=50)
    chat = replace(WORK, reasoning="split")

    def held(work: Generate) -> int | None:
        made = profiled(profile, work)
        assert isinstance(made, Generate)
        return made.reasoning_budget_tokens

    assert held(chat) == 50
    assert held(replace(chat, reasoning_budget_tokens=7)) == 7
    assert held(replace(chat, reasoning_budget_tokens=0)) == 0
    assert held(WORK) is None


@pytest.mark.parametrize("own", [(), (ChatMessage(role="system", content="mine"),)])
def test_a_profiles_system_text_comes_first_and_loses_nothing(own: tuple[ChatMessage, ...]) -> None:
    """There is one system message, as most templates want it, and the request's own text is in it."""
    prompt = replace(CHAT, messages=(*own, *CHAT.messages))
    for work in (
        replace(WORK, prompt=prompt),
        Warm(request_id=RequestId("r"), prompt=prompt),
        Tokenize(request_id=RequestId("r"), prompt=prompt),
    ):
        made = profiled(Profile(model=FOLDER, system="yours"), work)
        assert not isinstance(made, str)
        system, user = made.prompt.messages  # pyright: ignore
        assert system.role == "system"
        assert system.content == ("yours\n\nmine" if own else "yours")
        assert user == CHAT.messages[0]


def test_a_text_prompt_stays_as_it_is() -> None:
    """It has no system text and no template."""
    work = replace(WORK, prompt=TextPrompt(text="once"))
    made = profiled(Profile(model=FOLDER, system="yours", template_arguments={"a": 1}), work)
    assert made == work


def test_choices_that_share_a_prompt_still_do() -> None:
    """The very same object: that is how it is seen that they share one."""
    other = replace(WORK, prompt=replace(CHAT))
    made = profiled_choices(
        Profile(model=FOLDER, system="yours"), (WORK, replace(WORK, request_id=RequestId("s")), other)
    )
    assert made[0].prompt is made[1].prompt
    assert made[2].prompt is not made[0].prompt


def test_the_class_is_what_is_asked_for_if_nothing_else_is() -> None:
    standard = LatencyClass.STANDARD
    assert default_class(None, standard) is standard
    assert default_class(Profile(model="m"), standard) is standard
    assert default_class(Profile(model="m", latency_class="batch"), standard) is LatencyClass.BATCH


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ({"a*b*": {"model": "m"}}, "one `*`"),
        ({"": {"model": "m"}}, "1 to 128"),
        ({"a": {}}, "model"),
        ({"a": {"model": "m", "temprature": 1}}, "temprature"),
        ({"a": {"model": "m", "temperature": 3}}, "temperature"),
        ({"a": {"model": "m", "class": "urgent"}}, "class"),
    ],
)
def test_a_bad_profile_is_named(profiles: dict[str, object], said: str, tmp_path: Path) -> None:
    """When the settings are read, not when somebody asks for it."""
    with pytest.raises(SettingsError) as raised:
        settings_from({"profiles": profiles}, home=tmp_path, base=tmp_path, user_id=0)
    assert said in str(raised.value)


SETTINGS = """
[profiles."claude-*"]
model = "script"

[profiles.talker]
model = "script"
class = "batch"
max_tokens = 2
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """One model under three names."""
    script = make_client_model(tmp_path_factory.mktemp("models") / "script")
    with live_service({"script": script}, settings_toml=SETTINGS) as live:
        yield live


def test_every_dialect_answers_to_a_profiles_name(service: LiveService) -> None:
    """With the id that was asked for in its answer, and by one process for all of them."""
    messages = [{"role": "user", "content": TALK}]
    with service.client() as client:
        chat = client.post("/v1/chat/completions", json={"model": "claude-sonnet-4-5", "messages": messages})
        said = client.post("/v1/messages", json={"model": "claude-x", "max_tokens": 100, "messages": messages})
        response = client.post("/v1/responses", json={"model": "claude-y", "input": TALK, "store": False})
        count = client.post("/v1/messages/count_tokens", json={"model": "claude-x", "messages": messages})
        tokens = client.post("/tokenize", json={"model": "talker", "messages": messages})
        unknown = client.post("/v1/chat/completions", json={"model": "other", "messages": messages})
    assert (chat.json()["model"], chat.json()["choices"][0]["message"]["content"]) == ("claude-sonnet-4-5", TALKED)
    assert (said.json()["model"], said.json()["content"][0]["text"]) == ("claude-x", TALKED)
    assert response.json()["model"] == "claude-y"
    assert response.json()["output"][0]["content"][0]["text"] == TALKED
    assert count.json()["input_tokens"] == tokens.json()["count"]
    assert unknown.status_code == 404
    assert [model.name for model in service.status().models if model.process is not None] == ["script"]


def test_a_profiles_class_and_limits_hold(service: LiveService) -> None:
    """Where the request says nothing; its own words win."""
    asked = {"model": "talker", "messages": [{"role": "user", "content": TALK}]}
    with service.client() as client:
        answer = client.post("/v1/chat/completions", json=asked)
        own = client.post("/v1/chat/completions", json=asked | {"max_tokens": 3}, headers={"x-mlxd-class": "standard"})
    assert answer.headers["x-mlxd-class"] == "batch"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert own.headers["x-mlxd-class"] == "standard"
    assert own.json()["usage"]["completion_tokens"] == 3


def test_models_lists_names_that_clients_look_for(service: LiveService) -> None:
    """Claude Code keeps only ids that hold `claude`: there is one, and it can be asked for."""
    with service.client() as client:
        openai = {model["id"]: model["mlxd"].get("profile_of") for model in client.get("/v1/models").json()["data"]}
        anthropic = client.get("/v1/models?limit=1000", headers={"anthropic-version": "2023-06-01"}).json()["data"]
        one = client.get("/v1/models/claude-script").json()
    assert openai == {"script": None, "claude-script": "script", "talker": "script"}
    assert {model["id"] for model in anthropic} == set(openai)
    assert (one["id"], one["mlxd"]["profile_of"]) == ("claude-script", "script")
