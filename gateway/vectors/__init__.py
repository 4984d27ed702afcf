"""OpenAI's embeddings, and rerank as Jina and Cohere have it."""
