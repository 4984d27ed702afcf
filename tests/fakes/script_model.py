"""A model folder that answers with a script: any loader of Llama folders can run it, and it says what it is told.

The residual stream is a one-hot of the last token (attention and MLP write nothing into it), and `lm_head` is a table
of which token follows which. So a tag such as SC04, which the chat template copies behind the generation prompt, starts
one fixed chain of tokens, at any temperature, on any backend. It proves wire, parsing, stop, cancel and lifecycle laws;
it cannot prove cache numerics, since nothing it says depends on the KV.
"""
# pyright: basic

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


class Marker(NamedTuple):
    """A piece that is one token of its own in the tokenizer, such as `<think>`."""

    text: str


Piece = str | bytes | Marker

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONTEXT_TOKENS = 4096

SCRIPTS: Mapping[str, tuple[Piece, ...]] = {
    # text that is cut in awkward places
    "SC01": ("ok ", b"\xf0\x9f", b"\x91\xa9\xe2", b"\x80\x8d\xf0\x9f", b"\x9a\x80", " end01"),
    "SC02": (b"\xe6\x9d", b"\xb1\xe4", b"\xba\xac", "02."),
    "SC04": ("alpha", " be", "ta ga", "mma", " delta"),
    # tool calls: whole markers, split markers, two calls, bad escape, never closed, unknown name
    "SC07": (
        Marker("<tool_call>"),
        '\n{"name": "get_we',
        'ather", "arguments": {"city": "Zü',
        'rich \\"Altstadt\\"", "opts": {"days": [1, {"h": "}]"}]}}}',
        "\n",
        Marker("</tool_call>"),
    ),
    "SC08": (
        "<tool",
        '_call>\n{"na',
        'me": "get_weather", "argu',
        'ments": {"city": "Oslo"}}\n</too',
        "l_call>",
    ),
    "SC09": (
        "<tool_",
        'call>{"name": "get_weather", "arguments": {"city": "A"}}</tool_',
        "call>\n<t",
        'ool_call>{"name": "get_time", "arguments": {"tz": "B"}}</t',
        "ool_call>",
    ),
    "SC10": ("<to", 'ol_call>{"name": "grep", "arguments": {"pattern": "\\d+', '"}}</to', "ol_call>"),
    "SC12": ("<tool_ca", 'll>{"name": "get_weather", "arguments": {"city": "Ri'),
    "SC13": ("<tool_cal", 'l>{"name": "no_such_tool", "arguments": {}}</tool_cal', "l>"),
    # reasoning: whole markers, only the closing one, never closed, empty
    "SC15": (Marker("<think>"), "why15", " because", Marker("</think>"), "answer15"),
    "SC16": ("implicit16", " reasoning", "</thi", "nk>", "answer16"),
    "SC18": ("<t", "hink>never", *(f" w{number:02d}" for number in range(40))),
    "SC21": ("<think", "></think", ">answer21"),
    # long and endless
    "SC19": tuple(f" t{number:03d}" for number in range(200)),
    "SC20": (" la",),
}
ENDLESS = frozenset({"SC20"})


def said_by(tag: str) -> str:
    """The whole text of one script (of one round of an endless one)."""
    return b"".join(_piece_bytes(piece) for piece in SCRIPTS[tag]).decode()


def make_script_model(destination: Path, *, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """Write the model folder (about 18 MB, the same bytes every time) and return its path."""
    tokenizer = _tokenizer()
    return write_chain_model(
        destination, tokenizer, _successors(tokenizer), template=_chat_template(), context_tokens=context_tokens
    )


def write_chain_model(
    destination: Path, tokenizer: Tokenizer, successors: Mapping[int, int], *, template: str, context_tokens: int
) -> Path:
    """Write a Llama folder in which each token is followed by its successor, others by the end of the turn."""
    destination.mkdir(parents=True, exist_ok=True)
    vocabulary_size = tokenizer.get_vocab_size()
    width = -(-vocabulary_size // 128) * 128
    end = special_id(tokenizer, END_OF_TURN)
    config = _model_config(width, end, special_id(tokenizer, END_OF_TEXT), context_tokens)

    save_file(_weights(successors, vocabulary_size, width, end), destination / "model.safetensors", {"format": "mlx"})
    tokenizer.save(str(destination / "tokenizer.json"))
    (destination / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(destination / "config.json", config)
    _write_json(destination / "generation_config.json", {"eos_token_id": end, "temperature": 0.0})
    _write_json(
        destination / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TURN,
            "bos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": context_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    return destination


# --- tokenizer -----------------------------------------------------------------------------------------------------


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else the next code point from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    stand_ins = itertools.count(256)
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()


def _piece_bytes(piece: Piece) -> bytes:
    match piece:
        case Marker(text=text):
            return text.encode()
        case str():
            return piece.encode()
        case bytes():
            return piece


def spelling(piece: str | bytes) -> str:
    """A piece as byte-level vocabularies write it."""
    return "".join(_BYTE_CHARACTERS[byte] for byte in _piece_bytes(piece))


def _start_token(tag: str) -> str:
    return f"<|{tag}|>"


def _tokenizer() -> Tokenizer:
    """Every byte is a token, and so is every piece; without merges, text typed by a user is read byte by byte."""
    vocabulary = {character: byte for byte, character in enumerate(_BYTE_CHARACTERS)}
    for piece in itertools.chain.from_iterable(SCRIPTS.values()):
        if not isinstance(piece, Marker) and len(_piece_bytes(piece)) > 1:
            if spelling(piece) in vocabulary:
                raise ValueError(f"the piece {piece!r} is in two scripts: its successor would not be certain")
            vocabulary[spelling(piece)] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=False))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    controls = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, *map(_start_token, SCRIPTS))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    # not special: a detokenizer that skips special tokens must still show these
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def special_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that the tokenizer must have."""
    token = tokenizer.token_to_id(text)
    if token is None:
        raise ValueError(f"the tokenizer lacks {text!r}")
    return token


def _successors(tokenizer: Tokenizer) -> dict[int, int]:
    """Which token follows which. Tokens that are not in it are followed by the end of the turn."""
    end = special_id(tokenizer, END_OF_TURN)
    successors: dict[int, int] = {}
    for tag, pieces in SCRIPTS.items():
        said = [special_id(tokenizer, p.text if isinstance(p, Marker) else spelling(p)) for p in pieces]
        chain = [special_id(tokenizer, _start_token(tag)), *said]
        chain.append(chain[-1] if tag in ENDLESS else end)
        for token, successor in itertools.pairwise(chain):
            if successors.setdefault(token, successor) != successor:
                raise ValueError(f"{tag}: a token already has another successor")
    return successors


# --- weights -------------------------------------------------------------------------------------------------------


def _weights(
    successors: Mapping[int, int], vocabulary_size: int, width: int, end: int
) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(0)
    inner = 128

    def noise(rows: int, columns: int) -> NDArray[np.float32]:
        return (generator.standard_normal((rows, columns)) * 0.05).astype(np.float32)

    def zeros(rows: int, columns: int) -> NDArray[np.float32]:
        return np.zeros((rows, columns), np.float32)

    one_hot = zeros(width, width)
    table = zeros(width, width)
    for token in range(vocabulary_size):
        one_hot[token, token] = 1
        # after RMS norm a one-hot is sqrt(width) high: 1.5 puts the next logit so far ahead that no draw misses it
        table[successors.get(token, end), token] = 1.5
    ones = np.ones(width, np.float32)
    weights = {"model.embed_tokens.weight": one_hot, "lm_head.weight": table, "model.norm.weight": ones}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": noise(width, width),
            f"{prefix}.self_attn.k_proj.weight": noise(width, width),
            f"{prefix}.self_attn.v_proj.weight": noise(width, width),
            f"{prefix}.self_attn.o_proj.weight": zeros(width, width),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": noise(inner, width),
            f"{prefix}.mlp.up_proj.weight": noise(inner, width),
            f"{prefix}.mlp.down_proj.weight": zeros(width, inner),
        }
    return weights


def _model_config(width: int, end: int, beginning: int, context_tokens: int) -> dict[str, Any]:
    head_width = 64
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": width // head_width,
        "num_key_value_heads": width // head_width,
        "head_dim": head_width,
        "rms_norm_eps": 1e-5,
        "vocab_size": width,
        "max_position_embeddings": context_tokens,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": beginning,
        "eos_token_id": end,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


# --- template ------------------------------------------------------------------------------------------------------

TEMPLATE_HEAD = """\
{%- if tools -%}
<|im_start|>system
Tools: {{ tools | tojson }}
Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{ raise_exception('Unexpected message role.') }}
{%- endif -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if call.function -%}{%- set call = call.function -%}{%- endif %}
<tool_call>{"name": "{{ call.name }}", "arguments": {
{%- for key, value in call.arguments.items() -%}
{{ ', ' if not loop.first }}"{{ key }}": {{ value | tojson }}{%- endfor -%}
}}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% set asked = namespace(text='') -%}
{%- for message in messages if message.role == 'user' -%}
{%- set asked.text = message.content | string -%}
{%- endfor -%}
"""
"""ChatML with the two strictnesses of the field: system only first, and tool arguments as a mapping."""


def _chat_template() -> str:
    tags = "".join(f"{{%- if '{tag}' in asked.text -%}}{_start_token(tag)}{{%- endif -%}}" for tag in SCRIPTS)
    return f"{TEMPLATE_HEAD}{tags}{{%- endif -%}}"
