"""One MLX model in one process: tokenizer, template, scheduler, engine. Never HTTP."""
