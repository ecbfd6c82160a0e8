"""Subwords: text to token ids and back (the paper's 32k vocabulary of Table 1, 64k of Section 5).

The group's papers name SentencePiece. The vocabulary is learned here from the training text, once, because its size is
part of the model: the embedding and the softmax have a row for each piece.

* ids 0 to 3 are padding, begin, end and unknown; symbols such as `<2en>` follow; then 256 bytes, then the pieces.
* Byte pieces cost 256 ids and make unknown tokens impossible: with some 300 languages, some character is always new,
  and a perplexity that counts unknown tokens cannot be compared.
* Text is not normalized, so that decoding restores it exactly (only U+2581, SentencePiece's mark of a space, becomes a
  space).
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from gpipe_cli.data.cache import compute_digest, read_or_make
from gpipe_cli.errors import InputError, InvalidSettingError, error_text

PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3
IGNORED = -100
"""In targets: nothing to predict here. The number is the default of torch's cross-entropy."""

_SPECIAL = 4 + 256 + 1  # ids that are not characters, and SentencePiece's mark of a space
_MAX_LINES = 1_000_000  # lines to learn from, evenly spaced; more teach the pieces nothing new
_MIN_COVERAGE = 0.98  # SentencePiece's minimum
_MAX_CHARACTERS = 1000  # of a line; SentencePiece silently skips lines of more than 4192 bytes


class SentencePieceTokenizer:
    """The mapping between text and token ids. model: the content of SentencePiece's model file."""

    end = END
    mask = UNKNOWN  # no text encodes to it, as each byte has a piece

    def __init__(self, model: bytes) -> None:
        self.model = model

    @cached_property
    def _processor(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self.model)

    @property
    def size(self) -> int:
        return int(self._processor.vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin or end; no text encodes to a symbol."""
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)  # every process of a run does this
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; padding, begin, end and symbols decode to nothing."""
        return str(self._processor.decode(list(ids)))

    def symbol(self, name: str) -> int:
        """The id of a symbol that the vocabulary was trained with; UNKNOWN for any other."""
        return int(self._processor.piece_to_id(name))


def make_tokenizer(
    texts: Iterable[str],
    size: int,
    cache: Path,
    *,
    symbols: Sequence[str] = (),
    add_dummy_prefix: bool,
    saved_model: bytes | None = None,
) -> SentencePieceTokenizer:
    """Learn `size` ids, or fewer if the texts (lines or sentences) yield no more, with SentencePiece's unigram model;
    kept in `cache`. The same arguments give the same bytes. Or take `saved_model`, the vocabulary of an earlier run: in
    a new vocabulary, learned from other text, every id would mean something else.

    symbols: such as `<2en>`, with ids that no text encodes to. add_dummy_prefix: put a space before each text, so that
    its first word is the same piece as elsewhere; wrong for lines of a longer text, whose spaces are to be predicted.

    Raises InputError for a size that is too small for the texts, for a `saved_model` that is damaged, has more ids or
    lacks a symbol, and if the cache cannot be written.
    """
    if saved_model is not None:
        vocabulary = SentencePieceTokenizer(saved_model)
        try:
            stored_size = vocabulary.size if saved_model else 0
        except RuntimeError:
            stored_size = 0
        if stored_size == 0:
            raise InputError("vocabulary.model: the earlier run's file is damaged; put it back, or train again")
        if stored_size > size:
            why = f"the vocabulary of that run has {stored_size} ids; use dataset.vocabulary={stored_size}"
            raise InvalidSettingError("dataset.vocabulary", size, why)
        if missing_symbols := [symbol for symbol in symbols if vocabulary.symbol(symbol) == UNKNOWN]:
            languages = ", ".join(symbol[2:-1] for symbol in missing_symbols[:4])
            why = f"the pairs translate into languages that the vocabulary of that run does not know ({languages})"
            raise InputError(f"dataset.root: {why}; remove them, or train from the beginning")
        return vocabulary
    import sentencepiece

    lines = [text[start : start + _MAX_CHARACTERS] for text in texts for start in range(0, len(text), _MAX_CHARACTERS)]
    lines = lines[:: -(-len(lines) // _MAX_LINES) or 1]
    options: dict[str, Any] = {
        "vocab_size": size,
        "hard_vocab_limit": False,  # a short text may yield fewer pieces
        "model_type": "unigram",
        "pad_id": PAD,
        "bos_id": BEGIN,
        "eos_id": END,
        "unk_id": UNKNOWN,
        "unk_surface": "\N{REPLACEMENT CHARACTER}",
        "control_symbols": list(symbols),
        "byte_fallback": True,
        "character_coverage": 0.9995,  # SentencePiece's default; rarer characters are spelled in bytes
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,  # indentation
        "add_dummy_prefix": add_dummy_prefix,
    }
    name = compute_digest("vocabulary", [sentencepiece.__version__, options], lines)
    return SentencePieceTokenizer(read_or_make(cache, f"vocabulary-{name}", lambda: _train(lines, options)))


def _train(lines: list[str], options: dict[str, Any]) -> bytes:
    """SentencePiece's model file, in which more of the rare characters are spelled in bytes if the size has no room for
    them. Raises InvalidSettingError where SentencePiece refuses the size."""
    from sentencepiece import SentencePieceTrainer

    characters = Counter(chain.from_iterable(lines))
    room = max(0, options["vocab_size"] - _SPECIAL - len(options["control_symbols"]))
    share = sum(count for _, count in characters.most_common(room)) / max(1, characters.total())
    coverage = min(max(share, _MIN_COVERAGE), options["character_coverage"])
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            num_threads=1,  # several threads would add floats in any order
            minloglevel=2,  # errors only: no progress on stderr
            **(options | {"character_coverage": coverage}),
        )
    except RuntimeError as error:
        # such as "Vocabulary size is smaller than required_chars. 265 vs 289. Increase vocab_size or ..."
        least = re.search(r" vs (\d+)", error_text(error))
        why = f"cannot be learned from this text ({error_text(error)}); give more text"
        if least is not None:
            why = "has no room for the characters of this text and the 256 bytes that spell rarer ones; "
            why += f"use dataset.vocabulary={least[1]} or more"
        raise InvalidSettingError("dataset.vocabulary", options["vocab_size"], why) from error
    return model.getvalue()
