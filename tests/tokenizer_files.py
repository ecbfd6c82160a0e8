"""A tiny tokenizer in the files of Hugging Face's, and text for it."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [f"!! {name} goes to number {number}, and so on !!" for number in range(40) for name in ("north", "south")]


def write_tokenizer(folder: Path, *, lines: list[str] = LINES, **tokens: str) -> Path:
    """Byte-level pieces, of which 0 is the exclamation mark, and last the special tokens such as eos_token.

    The files ask for what belongs to no text of a language model: each text gets a token before it and is cut.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<start>", *tokens.values()])
    start = made.token_to_id("<start>")
    made.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", start)])
    made.enable_truncation(8)
    PreTrainedTokenizerFast(tokenizer_object=made, **tokens).save_pretrained(folder)
    return folder
