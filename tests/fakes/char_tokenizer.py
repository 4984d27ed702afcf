"""A fast tokenizer whose tokens are single characters, and some pairs of them: small models can be given it."""
# pyright: basic

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

END = "<end>"
CHARACTERS = '{}[]":,.-_ 0123456789abcdefghijklmnopqrstuvwxyz\n<>/'
SPECIAL = (END, "<mark>", "</mark>")


def char_tokenizer(pairs: Sequence[str] = ("th", "in", "er", "ok", '{"', '":', "tr")) -> PreTrainedTokenizerFast:
    """Its last ids are the special tokens, the last of them `</mark>`; `END` is the end token."""
    spelled = {
        character: ByteLevel(add_prefix_space=False).pre_tokenize_str(character)[0][0] for character in CHARACTERS
    }
    vocabulary = {spelled[character]: number for number, character in enumerate(CHARACTERS)}
    merges = []
    for pair in pairs:
        left, right = (spelled[character] for character in pair)
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = ByteLevelDecoder()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
