"""What a user may have meant: the nearest name here, and what other programs call things."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from gpipe_cli.config.old_words import VALUES

# Name of a setting in other programs, in any group -> ours, where they are too different for `suggest_nearest`.
ALIASES = dict.fromkeys(("lr", "learning_rate"), "learning_rate=constant learning_rate.peak")
# Pattern of SETTING=VALUE in other programs -> how it is written here, {} standing for the value.
_VALUE_ALIASES = {
    **dict.fromkeys(("precision=bf16*", "precision=*16*", "precision=half"), "precision=bfloat16"),
    "precision=fp32": "precision=float32",
    **dict.fromkeys(("recompute=true", "recompute=yes", "recompute=full"), "recompute=always"),
    **dict.fromkeys(("recompute=false", "recompute=no"), "recompute=never"),
    "optimizer=adamw": "optimizer=adam optimizer.decoupled=true",
    "model=vit": "model=timm model.name=vit_base_patch16_224 dataset.image_size=224",
    **{f"model=resnet{depth}": f"model=resnet model.depth={depth}" for depth in (18, 34, 50, 101, 152)},
    **{f"{key}={old}": f"{key}={new}" for key, words in VALUES.items() for old, new in words.items()},
    # names on the hub, and names of families
    **dict.fromkeys(("model=gpt2*", "model=bert-*", "model=t5-*"), "model=hf model.name={}"),
    **dict.fromkeys(
        (f"model={name}*" for name in ("llama", "mistral", "qwen", "gemma", "olmo", "phi", "bert", "t5", "flan-t5")),
        "model=hf model.name=FOLDER, which holds its config.json, or its name on the hub",
    ),
}


def resolve_alias(key: str, value: object) -> str:
    """How a value that other programs have is written here; "" for any other."""
    written = (ours for theirs, ours in _VALUE_ALIASES.items() if fnmatchcase(f"{key}={value}", theirs))
    return next(written, "").format(value)


def suggest_nearest(key: str, choices: Sequence[str], minimum: float = 0.68) -> str:
    """`; did you mean model.filters?` for `filters`; "" if no choice is more similar than `minimum` (1: equal)."""
    typed_last = key.rpartition(".")[2]

    def likeness(choice: str) -> float:
        # The last part is also compared alone; of equally similar names the least nested wins.
        last = choice.rpartition(".")[2]
        initials = "".join(word[:1] for word in last.split("_")) if "_" in last else None
        ratios = [SequenceMatcher(None, *pair).ratio() for pair in ((key, choice), (typed_last, last))]
        if typed_last == initials or (len(typed_last) > 2 and last.startswith(typed_last)):  # bs, batch: batch_size
            ratios.append(0.9)
        return max(ratios) - 0.001 * choice.count(".")

    best = max(choices, key=likeness)
    return f"; did you mean {best}?" if likeness(best) > minimum else ""
