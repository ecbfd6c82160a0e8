"""A Hugging Face tokenizer instead of a learned vocabulary: `dataset.tokenizer`.

Published weights, and numbers that are compared with others, belong to a tokenizer. All of it is left to
`AutoTokenizer`, so that every other program that reads the same folder gets the same ids.
"""

import importlib.util
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpipe_cli.errors import InvalidSettingError, error_text


class HFTokenizer:
    """The mapping from text to token ids of a folder, as `save_pretrained` writes it, or of a name on the hub."""

    def __init__(self, place: str) -> None:
        """Fetches a name into the hub's cache on this machine, whose locks let only one process fetch. Raises
        InvalidSettingError for a tokenizer that cannot be read or has no end token, and if transformers is not
        installed."""
        self._place = place
        if importlib.util.find_spec("transformers") is None:
            why = "needs transformers, which is not installed; pip install 'gpipe-cli[transformers]', or remove it"
            raise InvalidSettingError("dataset.tokenizer", place, why)
        # Loader processes cannot be forked while the tokenizer has threads.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        except Exception as error:  # from the hub, JSON or Rust: damaged files raise anything
            use = "give a folder with tokenizer.json and tokenizer_config.json, or a name on the Hugging Face hub"
            why = f"cannot be read ({error_text(error)}); {use}"
            raise InvalidSettingError("dataset.tokenizer", place, why) from error
        ends = [self._tokenizer.eos_token_id, self._tokenizer.sep_token_id]
        if ends == [None, None]:
            why = "has no token to end a document with; give it an eos_token in its tokenizer_config.json"
            raise InvalidSettingError("dataset.tokenizer", place, why)
        self.end: int = next(token for token in ends if token is not None)

    @property
    def mask(self) -> int:
        """The id of the token that hides another. Raises InvalidSettingError if there is none."""
        if (token := self._tokenizer.mask_token_id) is None:
            why = "has no token that hides another, as a masked language model needs"
            use = "give it a mask_token in its tokenizer_config.json"
            raise InvalidSettingError("dataset.tokenizer", self._place, f"{why}; {use}")
        return int(token)

    @cached_property
    def size(self) -> int:
        """The greatest id plus 1: `len(tokenizer)`, or more where ids have gaps."""
        return 1 + max(self._tokenizer.get_vocab().values())

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Name -> content of the files that `AutoTokenizer` reads it back from."""
        with TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    @property
    def model(self) -> bytes:
        """All files as a single text, on which the ids of any text depend."""
        return json.dumps({name: content.decode("latin-1") for name, content in self.files.items()}).encode()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without the special tokens that a tokenizer may put around it."""
        # each text by itself: a tokenizer takes some 200 bytes for each character of its input
        return [self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
