"""What kind of model does which work, said before a load."""

from typing import get_args

import pytest

from gateway.abilities import cannot_do
from protocol.failures import FailureKind
from protocol.generation import Detokenize, Embed, Generate, Rerank, TextPrompt, Tokenize, Warm, Work
from protocol.ids import ModelName, RequestId
from protocol.model_kind import ModelKind, capabilities_of
from protocol.sampling import Sampling

ID = RequestId("r")
PROMPT = TextPrompt(text="secret")
WORKS: dict[str, Work] = {
    "completions": Generate(request_id=ID, prompt=PROMPT, sampling=Sampling()),
    "embeddings": Embed(request_id=ID, inputs=(PROMPT,)),
    "rerank": Rerank(request_id=ID, query="secret", documents=("secret",)),
}


@pytest.mark.parametrize("kind", get_args(ModelKind))
def test_a_model_does_what_its_kind_can(kind: ModelKind) -> None:
    """And no more; the refusal names every route that would do, and nothing of the request."""
    for wanted, work in WORKS.items():
        refusal = cannot_do(ModelName("m"), kind, work)
        assert (refusal is None) == (wanted in capabilities_of(kind))
        if refusal is not None:
            assert (refusal.kind, refusal.param) == (FailureKind.UNSUPPORTED, "model")
            assert all(name in refusal.message for name in capabilities_of(kind))
            assert "secret" not in refusal.message
    warm = Warm(request_id=ID, prompt=PROMPT)
    assert (cannot_do(ModelName("m"), kind, warm) is None) == (kind == "generation")


@pytest.mark.parametrize("kind", get_args(ModelKind))
def test_every_model_has_a_tokenizer(kind: ModelKind) -> None:
    """Tokens can be asked of all of them."""
    assert cannot_do(ModelName("m"), kind, Tokenize(request_id=ID, prompt=PROMPT)) is None
    assert cannot_do(ModelName("m"), kind, Detokenize(request_id=ID, token_ids=(1,))) is None
