# pyright: basic
"""mlx-lm's BatchGenerator with nothing round it, in a process of its own. Started by `decode_bench.py`.

    python bare_generator.py MODEL_FOLDER

Reads one JSON list of user messages and a number of tokens a line, `[["Tell…", …], 96]`, and answers each with one
line: tokens per second of all rows, from the last row's first token to the first row's end. No row stops by itself.
"""

import json
import sys
import time

from mlx_lm import load
from mlx_lm.generate import BatchGenerator


def tokens_per_second(model, tokenizer, questions: list[str], tokens: int) -> float:
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]
    generator = BatchGenerator(model, max_tokens=tokens, stop_tokens=[])
    counts = dict.fromkeys(generator.insert(prompts), 0)
    began, before = 0.0, 0
    while True:
        for response in generator.next_generated():
            counts[response.uid] += 1
        now = time.perf_counter()
        if not began and all(counts.values()):
            began, before = now, sum(counts.values())
        if max(counts.values()) == tokens:
            generator.close()
            return (sum(counts.values()) - before) / (now - began)


def main() -> None:
    model, tokenizer, *_ = load(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        questions, tokens = json.loads(line)
        print(tokens_per_second(model, tokenizer, questions, tokens), flush=True)


if __name__ == "__main__":
    main()
