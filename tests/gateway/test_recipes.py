"""A recipe gives the same prompt on every machine, and reads nothing that it does not name."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import recipes
from gateway.durations import duration_text, parse_duration_seconds
from gateway.recipes import NamedText, Recipe, RecipeError, WarmBody, WarmMessage, WarmPin, load_recipe, render_recipe

RECIPE = """
model = "tiny"
system = "You know this repository."
files = ["src/*.py", "*.md", "src/a.py"]
messages = [{role = "user", content = "Hello"}, {role = "assistant", content = "Yes?"}]
pin = {name = "repo", ttl = "8h"}
"""


def rendered(path: Path, model: str | None = None, pin: str | None = None, ttl: str | None = None) -> WarmBody:
    recipe, files = load_recipe(path)
    return render_recipe(recipe, files, source="r", model=model, pin=pin, ttl=ttl)


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_recipe_becomes_a_conversation(tmp_path: Path) -> None:
    """Files once each, in the order of their names, with their names, behind the system's text."""
    write(tmp_path, src__b_dot_py="b = 2", src__a_dot_py="a = 1", README_dot_md="# read", r_dot_toml=RECIPE)
    body = rendered(tmp_path / "r.toml")
    system, *rest = body.messages
    assert system.role == "system"
    assert system.content == (
        "You know this repository.\n\n"
        '<file name="README.md">\n# read\n</file>\n\n'
        '<file name="src/a.py">\na = 1\n</file>\n\n'
        '<file name="src/b.py">\nb = 2\n</file>'
    )
    assert rest == [WarmMessage(role="user", content="Hello"), WarmMessage(role="assistant", content="Yes?")]
    assert (body.model, body.pin) == ("tiny", WarmPin(name="repo", ttl_seconds=8 * 3600))


TOOLS = (
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "act"}},
)


def test_a_recipe_has_tools(tmp_path: Path) -> None:
    """Written in it, or in a JSON file as a client logs them: the same body, in the same order."""
    inline = """
model = "m"
system = "s"
tools = [
  {type = "function", function = {name = "look", parameters = {type = "object", properties = {}}}},
  {type = "function", function = {name = "act"}},
]
"""
    listed, body = msgspec.json.encode(TOOLS).decode(), msgspec.json.encode({"model": "x", "tools": TOOLS}).decode()
    write(tmp_path, inline_dot_toml=inline, tools__list_dot_json=listed, body_dot_json=body)
    write(tmp_path, list_dot_toml="model = 'm'\nsystem = 's'\ntools = 'tools/list.json'")
    write(tmp_path, body_dot_toml="model = 'm'\nsystem = 's'\ntools = 'body.json'")
    bodies = [rendered(tmp_path / f"{name}.toml") for name in ("inline", "list", "body")]
    assert [body.tools for body in bodies] == [TOOLS] * 3
    assert len({msgspec.json.encode(body) for body in bodies}) == 1


def test_a_text_file_is_a_system_prompt(tmp_path: Path) -> None:
    """And the command line names the rest."""
    write(tmp_path, prompt_dot_txt="Be careful.")
    body = rendered(tmp_path / "prompt.txt", "tiny", "p", "90")
    assert body == WarmBody(
        model="tiny",
        messages=(WarmMessage(role="system", content="Be careful."),),
        pin=WarmPin(name="p", ttl_seconds=90),
    )


def test_the_command_line_goes_before_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, src__a_dot_py="a", README_dot_md="r", r_dot_toml=RECIPE)
    body = rendered(tmp_path / "r.toml", "other", "mine", "1d")
    assert (body.model, body.pin) == ("other", WarmPin(name="mine", ttl_seconds=86_400))


def test_hidden_files_are_not_meant(tmp_path: Path) -> None:
    """Keys and histories lie there: only a pattern that names one means it."""
    write(tmp_path, a_dot_txt="a", _dot_env="SECRET", _dot_git__config="SECRET")
    write(tmp_path, r_dot_toml='model = "m"\nfiles = ["**/*"]')
    (tmp_path / "r.toml").rename(tmp_path / ".r.toml")
    assert "SECRET" not in repr(rendered(tmp_path / ".r.toml"))
    (tmp_path / ".r.toml").write_text('model = "m"\nfiles = [".env"]')
    assert "SECRET" in repr(rendered(tmp_path / ".r.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = ", "not valid TOML"),
        ("mdl = 'm'", "unknown field"),
        ("model = 'm'", "nothing to warm"),
        ("system = 's'", "for which model"),
        ("model = 'm'\nfiles = ['/etc/passwd']", "below the recipe's folder"),
        ("model = 'm'\nfiles = ['../secret']", "below the recipe's folder"),
        ("model = 'm'\nfiles = ['link']", "link to outside"),
        ("model = 'm'\nfiles = ['*.nothing']", "matches no file"),
        ("model = 'm'\nfiles = ['binary']", "no UTF-8 text"),
        ("model = 'm'\nfiles = ['large']", "too long"),
        ("model = 'm'\nsystem = 's'\ntools = ['look']", "tools"),
        ("model = 'm'\nsystem = 's'\ntools = '../secret'", "below the recipe's folder"),
        ("model = 'm'\nsystem = 's'\ntools = 'link'", "below the recipe's folder"),
        ("model = 'm'\nsystem = 's'\ntools = 'none.json'", "cannot be read"),
        ("model = 'm'\nsystem = 's'\ntools = 'large'", "too long"),
        ("model = 'm'\nsystem = 's'\ntools = 'r.toml'", "not valid JSON"),
        ("model = 'm'\nsystem = 's'\ntools = 'no_tools.json'", "not a list of tools"),
        ("model = 'm'\nsystem = 's'\ntools = 'number.json'", "not a list of tools"),
        ("model = 'm'\nsystem = 's'\npin = {name = 'p', ttl = 'soon'}", "no length of time"),
        ("model = 'm'\nsystem = 's'\npin = {name = '../p'}", "pin.name"),
        ("model = 'm'\nmessages = [{role = 'system', content = 'c'}]", "role"),
    ],
)
def test_what_a_recipe_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    """One line that names the file and says what to do."""
    folder = tmp_path / "recipe"
    write(folder, r_dot_toml=text, large="x" * 2000, no_tools_dot_json='{"model": "m"}', number_dot_json="7")
    write(tmp_path, secret="SECRET")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(recipes, "FILE_MAX_BYTES", 1000)
    with pytest.raises(RecipeError) as refused:
        rendered(folder / "r.toml")
    assert words in str(refused.value)
    assert "SECRET" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_files_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes and by number."""
    monkeypatch.setattr(recipes, "FILES_MAX_BYTES", 250)
    write(tmp_path, **{f"f{number}": "x" * 100 for number in range(3)}, r_dot_toml='model = "m"\nfiles = ["f*"]')
    with pytest.raises(RecipeError, match="too long"):
        rendered(tmp_path / "r.toml")
    monkeypatch.setattr(recipes, "FILES_MAX_BYTES", 1000)
    monkeypatch.setattr(recipes, "FILES_MAX", 2)
    with pytest.raises(RecipeError, match="more than 2"):
        rendered(tmp_path / "r.toml")


def test_a_ttl_needs_a_pin() -> None:
    with pytest.raises(RecipeError, match="--pin"):
        render_recipe(Recipe(system="s"), (), source="r", model="m", pin=None, ttl="8h")


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=20)), max_size=4))
def test_equal_files_give_equal_prompts(files: list[tuple[str, str]]) -> None:
    """Nothing else goes in: no date, no path of this machine."""
    texts = [NamedText(name=name, text=text) for name, text in files]
    bodies = {
        repr(render_recipe(Recipe(system="s"), texts, source=source, model="m", pin=None, ttl=None))
        for source in ("a", "b")
    }
    assert len(bodies) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("8h", 28_800), ("1.5d", 129_600), (" 2w ", 1_209_600)],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1h", "soon", "1h30", "nan", "inf", "1e3", "9" * 30])
def test_no_lengths_of_time(text: str) -> None:
    with pytest.raises(ValueError, match="no length of time"):
        parse_duration_seconds(text)


@given(st.floats(0, 1e9))
def test_every_length_of_time_has_words(seconds: float) -> None:
    """Two units at most."""
    assert 2 <= len(duration_text(seconds).split()) <= 4
