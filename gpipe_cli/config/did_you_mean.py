"""What a user may have meant: the nearest name here, and what other programs call things."""

from collections.abc import Sequence
from difflib import SequenceMatcher

# Name of a setting in other programs -> ours, where they are too different for `nearest`.
ELSEWHERE = {"lr": "learning_rate=constant learning_rate.peak"}
# Pattern of GROUP=NAME in other programs -> how it is written here, {} standing for the name.
CHOICES_ELSEWHERE = {
    "optimizer=adamw": "optimizer=adam optimizer.decoupled=true",
    **{f"model=resnet{depth}": f"model=resnet model.depth={depth}" for depth in (18, 34, 50, 101, 152)},
    **dict.fromkeys(
        (f"model={family}*" for family in ("gpt2", "llama", "mistral", "qwen", "gemma", "bert", "t5", "flan-t5")),
        "model=hf model.name={}",
    ),
}


def nearest(key: str, choices: Sequence[str], least: float = 0.68) -> str:
    """`; did you mean model.filters?` for `filters`; "" if no choice is more similar than `least` (1: equal)."""
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
    return f"; did you mean {best}?" if likeness(best) > least else ""
