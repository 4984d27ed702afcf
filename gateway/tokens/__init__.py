"""Which tokens a prompt is, and which text tokens are, as vLLM asks it."""
