"""A model folder for real clients: it answers a tag by a call of the client's own tool, and a result by a text.

Like the script model, it says fixed chains of tokens. What differs is what agents need: a prompt of a hundred kilobytes
is a thousand tokens (a piece of 64 characters that is in no script is one token), and the chat template looks at what
came back. Only a result that holds PROOF, which no call spells out, is answered by SEEN: so a client that shows SEEN
has understood the call, run it, and sent back what it gave.
"""
# pyright: basic

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tests.fakes.script_model import (
    END_OF_TEXT,
    END_OF_TURN,
    START_OF_TURN,
    TEMPLATE_HEAD,
    special_id,
    spelling,
    write_chain_model,
)

CONTEXT_TOKENS = 131_072
PROOF = "mlxd-42"
SEEN = "seen4242"
TALK = "ask:talk"
TALKED = "alpha beta gamma delta"
PROVE = "echo mlxd-$((6*7))"
"""A shell command whose output is PROOF, and whose text is not."""

CALLS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "ask:weather": ("get_weather", {"city": "Oslo"}),
    "ask:claude": ("Bash", {"command": PROVE, "description": "Say it"}),
    "ask:codex": ("exec_command", {"cmd": PROVE}),
    "ask:opencode": ("bash", {"command": PROVE, "description": "Say it"}),
    "ask:qwen": ("run_shell_command", {"command": PROVE, "is_background": False, "description": "Say it"}),
    "ask:cline": ("run_commands", {"commands": [PROVE]}),
    "ask:pi": ("bash", {"command": PROVE}),
}
"""What is said to a tag in a user's message, if the request offers tools: the name of the tool and its arguments."""

EDIT = "ask:aider"
EDITED_FILE = "note.txt"
TEXTS: Mapping[str, str] = {
    TALK: TALKED,
    EDIT: f"{EDITED_FILE}\n```\n{PROOF}\n```\n{SEEN}",
    "result:seen": f"The tool has said it: {SEEN}.",
    "result:unseen": "The result does not hold what the tool says.",
    "ask:nothing": "Fine.",
}
_PIECE_CHARACTERS = 9


def make_client_model(destination: Path) -> Path:
    """Write the model folder, the same bytes every time, and return its path."""
    scripts = _scripts()
    pieces = list(dict.fromkeys(itertools.chain.from_iterable(scripts.values())))
    vocabulary = {"<unknown>": 0, **{spelling(piece): number for number, piece in enumerate(pieces, start=1)}}
    tokenizer = Tokenizer(WordLevel(vocab=vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]{1,64}"), "isolated")
    tokenizer.decoder = ByteLevelDecoder()
    controls = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, *map(_start_token, scripts))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])

    successors: dict[int, int] = {}
    for tag, said in scripts.items():
        chain = [_start_token(tag), *map(spelling, said), END_OF_TURN]
        for token, successor in itertools.pairwise(special_id(tokenizer, text) for text in chain):
            if successors.setdefault(token, successor) != successor:
                raise ValueError(f"{tag}: a token already has another successor")
    return write_chain_model(
        destination, tokenizer, successors, template=_chat_template(), context_tokens=CONTEXT_TOKENS
    )


def _scripts() -> dict[str, list[str]]:
    """Each text in pieces that no other text has, since a token has one successor."""
    calls = {
        tag: f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for tag, (name, arguments) in CALLS.items()
    }
    used: set[str] = set()
    return {tag: _cut(text, used) for tag, text in (*calls.items(), *TEXTS.items())}


def _cut(text: str, used: set[str]) -> list[str]:
    pieces: list[str] = []
    begin = 0
    while begin < len(text):
        end = min(begin + _PIECE_CHARACTERS, len(text))
        while text[begin:end] in used and end < len(text):
            end += 1
        if text[begin:end] in used:  # the rest is another text's rest, too: it goes to the piece before
            pieces[-1] += text[begin:end]
        else:
            pieces.append(text[begin:end])
        used.add(pieces[-1])
        begin = end
    return pieces


def _start_token(tag: str) -> str:
    return f"<|{tag}|>"


def _chat_template() -> str:
    """TEMPLATE_HEAD ends inside of `if add_generation_prompt`."""
    said_tags = json.dumps([*CALLS, TALK, EDIT])
    return f"""{TEMPLATE_HEAD}\
{{%- set now = namespace(tag='', result='') -%}}
{{%- for message in messages -%}}
{{%- if message.role == 'user' -%}}
{{%- for tag in {said_tags} if tag in (message.content | string) -%}}
{{%- set now.tag = tag -%}}{{%- set now.result = '' -%}}
{{%- endfor -%}}
{{%- elif message.role == 'tool' -%}}
{{%- set now.result = now.result ~ message.content ~ ' ' -%}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if now.result -%}}{{{{ '<|result:seen|>' if '{PROOF}' in now.result else '<|result:unseen|>' }}}}
{{%- elif now.tag and (tools or now.tag in ['{TALK}', '{EDIT}']) -%}}{{{{ '<|' ~ now.tag ~ '|>' }}}}
{{%- else -%}}<|ask:nothing|>
{{%- endif -%}}
{{%- endif -%}}"""
