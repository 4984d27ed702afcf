"""Which models exist: folders below the models directories that hold a config.json.

A name from a client is only ever compared with the names found here; it never becomes part of a path. A folder that
cannot be served is listed with its problem, and disturbs no other.
"""

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from protocol.ids import ModelName
from protocol.model_kind import ModelKind, UnsupportedFolder, folder_facts, kind_of, text_limit_tokens

MAX_DEPTH = 3
_MAX_CONFIG_BYTES = 16 * 1024**2
_MAX_HEADER_BYTES = 100 * 1000**2
"""The safetensors library's own limit."""

_INDEX = "model.safetensors.index.json"

Signature = tuple[tuple[str, int, int, int], ...]
"""Name, size, mtime and inode of everything in a folder: equal means it need not be read again."""


class ModelEntry(Struct, frozen=True, kw_only=True):
    """One model. `problem` None means nothing speaks against loading it."""

    name: ModelName
    path: str
    created_unix: int
    weight_bytes: int = 0
    context_tokens: int | None = None
    problem: str | None = None
    kind: ModelKind = "generation"


class Broken(Exception):
    """A model folder cannot be served; the words name the file."""


class _TextConfig(Struct, frozen=True, kw_only=True):
    max_position_embeddings: int | None = None


class _Config(Struct, frozen=True, kw_only=True):
    model_type: str | None = None
    max_position_embeddings: int | None = None
    text_config: _TextConfig | None = None


class _Index(Struct, frozen=True, kw_only=True):
    weight_map: dict[str, str]


class _Tensor(Struct, frozen=True, kw_only=True):
    data_offsets: tuple[int, int]


class Catalog:
    """The models in these directories, the first directory winning when two hold the same name.

    Every listing walks the folders again (a few directory reads) but reads only the files of those that changed.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = tuple(directories)
        self._known: dict[str, tuple[Signature, ModelEntry]] = {}

    def entries(self) -> tuple[ModelEntry, ...]:
        """All models by name, good and broken."""
        found: dict[str, tuple[Signature, ModelEntry]] = {}
        for directory in self._directories:
            for name, path in _model_folders(directory):
                if name not in found:
                    found[name] = self._examined(name, path)
        self._known = found
        return tuple(found[name][1] for name in sorted(found))

    def find(self, name: str) -> ModelEntry | None:
        """The model of exactly this name, as its folder is now."""
        known = self._known.get(name)
        if known is not None and _has_config(known[1].path):
            self._known[name] = self._examined(name, known[1].path)
        else:
            self.entries()
        found = self._known.get(name)
        return None if found is None else found[1]

    def _examined(self, name: str, path: str) -> tuple[Signature, ModelEntry]:
        signature = _signature(path)
        known = self._known.get(name)
        if known is not None and known[0] == signature and known[1].path == path:
            return known
        return signature, examine(ModelName(name), path)


def examine(name: ModelName, path: str) -> ModelEntry:
    """Read what can be known of a model folder without loading it. Never raises for what lies in the folder."""
    created_unix = 0
    weight_bytes = 0
    context_tokens: int | None = None
    problem: str | None = None
    kind: ModelKind = "generation"
    folder = Path(path)
    try:
        names = _listed(folder)
        created_unix = int(_facts(folder / "config.json").st_mtime)
        config = _read_config(folder)
        context_tokens = _context_tokens(config)
        shards = _weight_files(folder, names)
        weight_bytes = sum(_facts(folder / shard).st_size for shard in shards)
        for shard in shards:
            _check_weights(folder / shard)
        if config.model_type is None:
            raise Broken("config.json has no model_type; is this a language model's folder?")
        kind, text_limit = _kind_and_limit(name, folder, names)
        context_tokens = context_tokens if kind == "generation" else text_limit
    except Broken as why:
        problem = str(why)
    return ModelEntry(
        name=name,
        path=path,
        created_unix=created_unix,
        weight_bytes=weight_bytes,
        context_tokens=context_tokens,
        problem=problem,
        kind=kind,
    )


def _model_folders(directory: Path) -> Iterator[tuple[str, str]]:
    """(name, path) of every folder below `directory` that holds a config.json or cannot be looked into."""
    yield from _walk(str(directory), name="", depth=0, ancestors=frozenset())


def _walk(path: str, *, name: str, depth: int, ancestors: frozenset[str]) -> Iterator[tuple[str, str]]:
    real = os.path.realpath(path)
    if real in ancestors:  # a symlink that leads back up
        return
    try:
        with os.scandir(path) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        if depth:
            yield name, path  # examine() will say that it cannot be read
        return
    if depth and any(entry.name == "config.json" for entry in entries):
        yield name, path  # and nothing below a model is another model
        return
    if depth == MAX_DEPTH:
        return
    for entry in entries:
        if entry.name.startswith(".") or not _is_servable(entry.name) or not _is_folder(entry):
            continue
        below = f"{name}/{entry.name}" if name else entry.name
        yield from _walk(entry.path, name=below, depth=depth + 1, ancestors=ancestors | {real})


def _is_servable(name: str) -> bool:
    """A folder's name becomes a model id: text that JSON and a terminal can show."""
    return name.isprintable() and not any("\ud800" <= character <= "\udfff" for character in name)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _has_config(path: str) -> bool:
    return os.path.lexists(f"{path}/config.json")


def _signature(path: str) -> Signature:
    rows: list[tuple[str, int, int, int]] = []
    try:
        files = sorted(Path(path).iterdir())
    except OSError:
        return ()
    for file in files:
        try:
            facts = file.stat()
        except OSError:
            rows.append((file.name, -1, -1, -1))
        else:
            rows.append((file.name, facts.st_size, facts.st_mtime_ns, facts.st_ino))
    return tuple(rows)


def _listed(folder: Path) -> frozenset[str]:
    try:
        return frozenset(file.name for file in folder.iterdir())
    except OSError as why:
        raise Broken(f"the folder cannot be read ({why.strerror}); check its permissions") from None


def _facts(path: Path) -> os.stat_result:
    try:
        facts = path.stat()
    except OSError as why:
        if path.is_symlink():
            raise Broken(f"{path.name} is a symlink to a file that is not there; download the model again") from None
        raise Broken(f"{path.name} cannot be read ({why.strerror})") from None
    if not stat.S_ISREG(facts.st_mode):
        raise Broken(f"{path.name} is not a file")
    return facts


def _read(path: Path, *, max_bytes: int) -> bytes:
    if _facts(path).st_size > max_bytes:
        raise Broken(f"{path.name} is larger than {max_bytes} bytes")
    try:
        return path.read_bytes()
    except OSError as why:
        raise Broken(f"{path.name} cannot be read ({why.strerror}); check its permissions") from None


def _read_config(folder: Path) -> _Config:
    try:
        return msgspec.json.decode(_read(folder / "config.json", max_bytes=_MAX_CONFIG_BYTES), type=_Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise Broken(f"config.json is not a valid configuration ({why})") from None


def _kind_and_limit(name: ModelName, folder: Path, names: frozenset[str]) -> tuple[ModelKind, int | None]:
    config = _read(folder / "config.json", max_bytes=_MAX_CONFIG_BYTES)
    modules, limits = (
        _read(folder / file, max_bytes=_MAX_CONFIG_BYTES) if file in names else None
        for file in ("modules.json", "sentence_bert_config.json")
    )
    try:
        return kind_of(folder_facts(name, config, modules)), text_limit_tokens(config, limits)
    except UnsupportedFolder as why:
        raise Broken(str(why)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise Broken(f"what kind of model this is cannot be read ({why})") from None


def _context_tokens(config: _Config) -> int | None:
    """A multimodal model keeps the text model's limit one level down."""
    limits = [config.max_position_embeddings]
    if config.text_config is not None:
        limits.append(config.text_config.max_position_embeddings)
    return next((limit for limit in limits if limit is not None and limit > 0), None)


def _weight_files(folder: Path, names: frozenset[str]) -> list[str]:
    """The files mlx-lm will load, after a check that the index asks for no other."""
    shards = sorted(name for name in names if name.startswith("model") and name.endswith(".safetensors"))
    if _INDEX in names:
        try:
            index = msgspec.json.decode(_read(folder / _INDEX, max_bytes=_MAX_CONFIG_BYTES), type=_Index)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
            raise Broken(f"{_INDEX} is not a valid index ({why})") from None
        missing = sorted(set(index.weight_map.values()) - names)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise Broken(f"{missing[0]!r}{more} is named in {_INDEX} and not there; download the model again")
    if not shards:
        raise Broken("no weights: there is no model*.safetensors; download or convert the model again")
    return shards


def _check_weights(path: Path) -> None:
    """Compare a safetensors file's size with what its header promises; reads the header only."""
    size = _facts(path).st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            (header_bytes,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
            if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
                raise Broken(f"{path.name} is cut short or no safetensors file; download it again")
            header = file.read(header_bytes)
    except OSError as why:
        raise Broken(f"{path.name} cannot be read ({why.strerror}); check its permissions") from None
    try:
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        ends = [
            msgspec.json.decode(tensor, type=_Tensor).data_offsets[1]
            for name, tensor in tensors.items()
            if name != "__metadata__"
        ]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Broken(f"{path.name} has a damaged header; download it again") from None
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise Broken(f"{path.name} has {size} bytes and its header promises {expected}; download it again")
