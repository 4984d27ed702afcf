"""Recipes: what `mlxd warm` warms, as a file. A text file is a system prompt; a TOML file names its parts.

`parse_recipe`, `parse_tools` and `render_recipe` decide; `load_recipe` and `read_files` read. The files of a recipe
become a part of its system prompt, in the order of their names, so that the same files give the same prompt on every
machine.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.durations import parse_duration_seconds

FILE_MAX_BYTES = 1024**2
FILES_MAX_BYTES = 8 * 1024**2
FILES_MAX = 1000

PinName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


Tool = dict[str, Any]
"""One of a chat request's `tools`, as it is written: the service says what is wrong with it."""


class RecipeError(Exception):
    """The recipe cannot be used. One line: which file, what is wrong, what is allowed. Never quotes a content."""


class RecipeMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message after the system's."""

    role: Literal["user", "assistant"]
    content: str


class RecipePin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep the prefix under this name, for so long (`8h`), or until it is unpinned."""

    name: PinName
    ttl: str | None = None


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The TOML file. `files` are globs, relative to it.

    `tools` are as a chat request has them, or the path of a JSON file with such a list (or with a body that has one),
    relative likewise: a prefix with other tools, or with these in another order, is another prefix.
    """

    model: str | None = None
    system: str = ""
    files: tuple[str, ...] = ()
    tools: tuple[Tool, ...] | str = ()
    messages: tuple[RecipeMessage, ...] = ()
    pin: RecipePin | None = None


class NamedText(Struct, frozen=True, kw_only=True):
    """A file of a recipe. `name` is its path below the recipe's folder, with slashes."""

    name: str
    text: str


class WarmPin(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pin as the route takes it."""

    name: str
    ttl_seconds: float | None = None


class WarmMessage(Struct, frozen=True, kw_only=True):
    """A message as the route takes it."""

    role: str
    content: str


class WarmBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of POST /v1/cache/warm."""

    model: str
    messages: tuple[WarmMessage, ...]
    tools: tuple[Tool, ...] = ()
    pin: WarmPin | None = None


# --- deciders --------------------------------------------------------------------------------------------------------


def parse_recipe(text: str, *, source: str) -> Recipe:
    """Raises RecipeError."""
    try:
        return msgspec.convert(tomllib.loads(text), Recipe)
    except tomllib.TOMLDecodeError as why:
        raise RecipeError(
            f"{source}: not valid TOML ({why}); a text file that is no recipe needs another suffix"
        ) from None
    except msgspec.ValidationError as why:
        raise RecipeError(
            f"{source}: {why}; a recipe has model, system, files, tools, messages and pin = {{name, ttl}}"
        ) from None


def render_recipe(
    recipe: Recipe, files: Sequence[NamedText], *, source: str, model: str | None, pin: str | None, ttl: str | None
) -> WarmBody:
    """What to ask the service. `model`, `pin` and `ttl` come from the command line and go before the recipe's.

    Raises RecipeError.
    """
    chosen = model or recipe.model
    if not chosen:
        raise RecipeError(f"{source}: for which model? Name it with --model, or as `model` in a recipe")
    system = "\n\n".join(part for part in (recipe.system, *map(_file_part, files)) if part)
    messages = [WarmMessage(role="system", content=system)] if system else []
    messages += [WarmMessage(role=message.role, content=message.content) for message in recipe.messages]
    if isinstance(recipe.tools, str):
        raise RecipeError(f"{source}: tools: {recipe.tools!r} was not read")
    if not messages:
        raise RecipeError(f"{source}: there is nothing to warm; write a system prompt, files or messages")
    return WarmBody(
        model=chosen,
        messages=tuple(messages),
        tools=recipe.tools,
        pin=_pin(recipe.pin, pin, ttl, source=source),
    )


def parse_tools(text: str, *, source: str) -> tuple[Tool, ...]:
    """A JSON file's list of tools, or the `tools` of a request's body. Raises RecipeError."""
    try:
        written = msgspec.json.decode(text)
        return msgspec.convert(written["tools"] if isinstance(written, dict) else written, tuple[Tool, ...])
    except (msgspec.ValidationError, KeyError):
        raise RecipeError(
            f"{source}: not a list of tools; write the `tools` of a chat request, or a body that has them"
        ) from None
    except msgspec.DecodeError as why:
        raise RecipeError(f"{source}: not valid JSON ({why}); write the `tools` of a chat request") from None


def _file_part(file: NamedText) -> str:
    return f'<file name="{file.name}">\n{file.text}\n</file>'


def _pin(written: RecipePin | None, name: str | None, ttl: str | None, *, source: str) -> WarmPin | None:
    chosen = name or (written.name if written else None)
    lasting = ttl or (written.ttl if written else None)
    if chosen is None:
        if ttl is not None:
            raise RecipeError(f"{source}: --ttl is for a pinned prefix; give it a name with --pin")
        return None
    try:
        return WarmPin(name=chosen, ttl_seconds=None if lasting is None else parse_duration_seconds(lasting))
    except ValueError as why:
        raise RecipeError(f"{source}: pin: {why}") from None


# --- reading ---------------------------------------------------------------------------------------------------------


def load_recipe(path: Path) -> tuple[Recipe, tuple[NamedText, ...]]:
    """The recipe, with its tools read, and its files, whole. Raises RecipeError."""
    text = _read_text(path, name=str(path), max_bytes=FILES_MAX_BYTES)
    if path.suffix.lower() != ".toml":
        return Recipe(system=text), ()
    recipe = parse_recipe(text, source=str(path))
    folder = path.absolute().parent
    if isinstance(recipe.tools, str):
        recipe = msgspec.structs.replace(recipe, tools=_read_tools(folder, recipe.tools, source=str(path)))
    return recipe, read_files(folder, recipe.files, source=str(path))


def read_files(folder: Path, globs: Sequence[str], *, source: str) -> tuple[NamedText, ...]:
    """The files that match, each once, in the order of their names. None may lie outside of `folder`.

    Raises RecipeError: for a glob that matches nothing, and for what is too large, no text, or elsewhere.
    """
    root = folder.resolve()
    found: dict[str, Path] = {}
    for pattern in globs:
        if not pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise RecipeError(f"{source}: files: {pattern!r} must be a path below the recipe's folder")
        matches = [path for path in folder.glob(pattern) if _is_meant(path, folder, pattern) and path.is_file()]
        if not matches:
            raise RecipeError(f"{source}: files: {pattern!r} matches no file; correct it, or leave it out")
        for path in matches:
            name = path.relative_to(folder).as_posix()
            if not path.resolve().is_relative_to(root):
                raise RecipeError(f"{source}: files: {name} is a link to outside of the recipe's folder; copy it there")
            found[name] = path
        if len(found) > FILES_MAX:
            raise RecipeError(f"{source}: files: more than {FILES_MAX}; choose fewer")
    texts: list[NamedText] = []
    left_bytes = FILES_MAX_BYTES
    for name in sorted(found):
        text = _read_text(found[name], name=name, max_bytes=min(FILE_MAX_BYTES, left_bytes))
        left_bytes -= len(text.encode())
        texts.append(NamedText(name=name, text=text))
    return tuple(texts)


def _read_tools(folder: Path, name: str, *, source: str) -> tuple[Tool, ...]:
    path = folder / name
    if Path(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise RecipeError(f"{source}: tools: {name!r} must be a JSON file below the recipe's folder")
    return parse_tools(_read_text(path, name=name, max_bytes=FILE_MAX_BYTES), source=f"{source}: tools: {name}")


def _is_meant(path: Path, folder: Path, pattern: str) -> bool:
    """Hidden files and folders hold keys and histories: only a pattern that names one itself means it."""
    hidden = [part for part in path.relative_to(folder).parts if part.startswith(".")]
    return all(part in Path(pattern).parts for part in hidden)


def _read_text(path: Path, *, name: str, max_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as why:
        raise RecipeError(f"{name}: cannot be read ({why.strerror or why}); check its path and permissions") from None
    if len(data) > max_bytes:
        raise RecipeError(
            f"{name}: too long: a file may have {FILE_MAX_BYTES} bytes and all together {FILES_MAX_BYTES}; leave it out"
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RecipeError(f"{name}: is no UTF-8 text; leave it out") from None
