"""The script model keeps its word, in mlx-lm's own generation: other tests rest on that."""

from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler

from tests.fakes.script_model import ENDLESS, SCRIPTS, said_by


@pytest.fixture(scope="module")
def loaded(script_model: Path) -> Any:
    return mlx_lm.load(str(script_model))[:2]


@pytest.mark.parametrize("tag", SCRIPTS)
def test_a_tag_starts_its_script(loaded: Any, tag: str) -> None:
    """Whatever the temperature, the answer is the script and then the end of the turn; an endless one goes on."""
    model, tokenizer = loaded
    limit = 10 if tag in ENDLESS else len(SCRIPTS[tag]) + 2
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": f"say {tag}"}], add_generation_prompt=True)
    tokens = [
        response.token
        for response in mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens=limit, sampler=make_sampler(temp=1.0)
        )
    ]
    text = tokenizer.decode(tokens)

    if tag in ENDLESS:
        assert text == said_by(tag) * limit
    else:
        assert text == said_by(tag) + tokenizer.eos_token
        assert len(tokens) == len(SCRIPTS[tag]) + 1


def test_the_template_is_as_strict_as_the_field(loaded: Any) -> None:
    """System messages only at the start, no unknown roles, tool arguments as a mapping."""
    _, tokenizer = loaded
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", "days": 2}}}

    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False
    )

    assert '<tool_call>{"name": "f", "arguments": {"city": "Oslo", "days": 2}}</tool_call>' in rendered
    for messages in (
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "wizard", "content": "a"}],
    ):
        with pytest.raises(Exception, match=r"System message must be|Unexpected message role"):
            tokenizer.apply_chat_template(messages, tokenize=False)
