"""Workers that embed and rerank: texts in, vectors or scores out, many rows in one batch."""
