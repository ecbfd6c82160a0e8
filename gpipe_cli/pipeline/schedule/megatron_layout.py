"""A cut written as Megatron-LM's `--pipeline-model-parallel-layout` (its pipeline_parallel_layer_layout.py):
`E t*3 | (t*4 |)*2 t*2 L` is `E t t t | t t t t | t t t t | t t L`, four stages.

`|` separates stages and `*n` repeats a letter or a group in brackets; blanks and commas do not count. Megatron builds a
model out of these letters; here the model is there already. So `t` is one layer, from the first to the last of the
class that most layers have; `E` stands for all layers before these, `L` for all layers behind them.
"""

import re
from collections import Counter
from collections.abc import Sequence

from gpipe_cli.errors import InputError
from gpipe_cli.units import plural

_GROUPS = (re.compile(r"\(([^()]+)\)\*([0-9]{1,3})"), re.compile(r"(.)\*([0-9]{1,3})"))


def balance_of(text: str, classes: Sequence[object], partitions: int) -> tuple[int, ...]:
    """The layers of each stage of a model whose layers have these `classes`, cut as `text` says; a stage may have none.

    Raises InputError for a text that is no layout, or is one of another model or of another number of `partitions`.
    """
    stages, given = _expanded(text).split("|"), f"partition.balance={text}"
    letters, example = "".join(stages), "for example partition.balance='E t|t*2 L'"
    if unknown := re.search("[^EtL]", letters):
        raise InputError(f"{given}: {unknown[0]!r} is neither one of E, t and L nor part of | and *n; {example}")
    if not re.fullmatch("Et+L", letters):
        raise InputError(f"{given}: must have E, then every t, then L; {example}")
    if len(stages) != partitions:
        many = len(stages)
        raise InputError(f"{given}: has {many} stages, and partitions={partitions}; use partitions={many}")
    common = Counter(classes).most_common()
    blocks = [at for at, one in enumerate(classes) if (one, common[0][1]) in common]
    first, end = blocks[0], blocks[-1] + 1
    if letters.count("t") != end - first:
        rest = f"E is {plural(first, 'layer')} and L is {len(classes) - end}"
        raise InputError(f"{given}: has {letters.count('t')} t, and the model {end - first} ({rest}); use as many")
    sizes = {"E": first, "t": 1, "L": len(classes) - end}
    return tuple(sum(sizes[letter] for letter in stage) for stage in stages)


def _expanded(text: str) -> str:
    """The layout without blanks, commas and repetitions."""
    text = re.sub(r"[\s,]", "", text)
    for group in _GROUPS:
        text = group.sub(lambda found: found[1] * int(found[2]), text)
    return text
