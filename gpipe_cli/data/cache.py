"""The cache of text data, for all processes of a run and for later runs: vocabularies and encoded corpora.

Every process of a run opens the same text; the first trains the vocabulary and encodes, the others wait and read. A
file's name is a digest of everything its content depends on, so no file is ever stale; its first bytes are a
digest of the content, so a damaged file is noticed and replaced.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from gpipe_cli.errors import InputError, InvalidSettingError, error_text
from gpipe_cli.system.files import open_to_append, write_atomic

_DIGEST_BYTES = 16


def cache_folder(setting: str | None) -> Path:
    """The folder of the cache: dataset.cache, or `$XDG_CACHE_HOME/gpipe`, or `~/.cache/gpipe`; it need not exist.

    Raises InputError where none is set and the user has no home.
    """
    if setting is not None:
        return Path(setting).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "gpipe"
    try:
        return Path.home() / ".cache" / "gpipe"
    except RuntimeError as error:
        raise InputError("dataset.cache=null: this user has no home folder; set dataset.cache to a folder") from error


def compute_digest(purpose: str, facts: object, texts: Iterable[str | bytes] = ()) -> str:
    """A digest, 32 hexadecimal digits, of a purpose, facts (anything JSON can write) and texts, in order."""
    digest = hashlib.blake2b(json.dumps([purpose, facts], sort_keys=True).encode(), digest_size=_DIGEST_BYTES)
    for text in texts:
        content = text if isinstance(text, bytes) else text.encode()
        digest.update(b"%d " % len(content))  # the length tells ("ab", "c") from ("a", "bc")
        digest.update(content)
    return digest.hexdigest()


def read_or_make(folder: Path, name: str, make: Callable[[], bytes]) -> bytes:
    """The content of `name` in `folder`; made and stored, by a single process, where it is missing or damaged.

    Reading needs no permission to write. Raises InputError where the folder cannot be written, and what `make` raises.
    """
    path = folder / name
    if (content := _read(path)) is not None:
        return content
    try:
        with file_lock(folder / f".{name}.lock"):
            if (content := _read(path)) is None:  # otherwise another process has made it while this process waited
                content = make()
                write_atomic(path, _digest(content) + content)
            return content
    except OSError as error:
        why = f"cannot be written ({error_text(error)}); set dataset.cache to a folder that can"
        raise InvalidSettingError("dataset.cache", folder, why) from error


def read_or_make_tensors(folder: Path, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """`read_or_make` for named tensors."""
    return load(read_or_make(folder, name, lambda: save(make())))


@contextmanager
def file_lock(file: Path) -> Iterator[None]:
    """Holds the lock `file`, which one process at a time can have, except on a file system without locks; the kernel
    releases it if the process dies."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(file) as lock:  # a user may have a file of this name, which is left as it is
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _read(path: Path) -> bytes | None:
    """The content without its digest; None if the file is missing, unreadable or damaged."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    content = stored[_DIGEST_BYTES:]
    return content if _digest(content) == stored[:_DIGEST_BYTES] else None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
