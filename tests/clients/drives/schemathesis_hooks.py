"""Loaded by schemathesis: a request is for a model that is there, and for an answer that ends soon."""

import os
from typing import Any

import schemathesis

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Only where a body has the shape for it: broken ones stay broken."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        vectors = any(name in body for name in ("query", "documents")) or "/embeddings" in context.operation.path
        body = {**body, "model": os.environ["MLXD_EMBEDDER" if vectors else "MLXD_MODEL"]}
        body |= {name: min(body[name], 8) for name in _LENGTHS if type(body.get(name)) is int}
        if type(body.get("n")) is int:
            body["n"] = min(body["n"], 2)
        body.pop("background", None)  # goes on behind the answer
    return body
