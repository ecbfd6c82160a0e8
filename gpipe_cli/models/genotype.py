"""The two evolved cells of AmoebaNet-B and AmoebaNet-D (Real et al. 2018), as data.

The paper trains D for its scaling tables and B for ImageNet. The wiring is that of the TPU reference
(tensorflow/tpu, models/official/amoeba_net/model_specs.py).
"""

from dataclasses import dataclass
from typing import Literal

Variant = Literal["b", "d"]
Step = tuple[str, int]  # (operation, the state that it reads)


@dataclass(frozen=True, slots=True)
class CellGenotype:
    """How a cell is wired.

    State 0 is the cell's input behind a 1x1 convolution and state 1 the output of the cell before that input; each pair
    of steps adds the next state (2, 3, ...) as the sum of two operations.

    Attributes:
        pairs: for each new state, its two steps.
        output: the states that are concatenated as the cell's output.
    """

    pairs: tuple[tuple[Step, Step], ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Genotype:
    """The cell that keeps the resolution and the one that halves it.

    In a reduction cell the operations that read states 0 and 1 have stride 2.
    """

    normal: CellGenotype
    reduction: CellGenotype


AMOEBANET_B = Genotype(
    normal=CellGenotype(
        pairs=(
            (("1x1", 1), ("max_pool_3x3", 1)),
            (("identity", 1), ("separable_3x3_2", 0)),
            (("1x1", 1), ("separable_3x3_2", 0)),
            (("1x1", 2), ("identity", 2)),
            (("avg_pool_3x3", 1), ("1x1", 5)),
        ),
        output=(0, 3, 4, 6),
    ),
    # The reference calls the 5x5 "dilated", but builds it without dilation; so do we.
    reduction=CellGenotype(
        pairs=(
            (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
            (("identity", 2), ("3x3", 1)),
            (("separable_5x5_2", 2), ("max_pool_3x3", 2)),
            (("identity", 3), ("separable_3x3_2", 1)),
            (("avg_pool_3x3", 4), ("1x1", 3)),
        ),
        output=(5, 6),
    ),
)

# The drawing of D's normal cell that its authors published joins three states, their code four. Four it is: with three,
# B (18, 512) would have 498M parameters instead of the 557M that the paper reports.
AMOEBANET_D = Genotype(
    normal=CellGenotype(
        pairs=(
            (("1x1", 1), ("max_pool_3x3", 1)),
            (("identity", 1), ("1x7_7x1", 0)),
            (("1x1", 0), ("1x7_7x1", 0)),
            (("max_pool_3x3", 2), ("identity", 2)),
            (("avg_pool_3x3", 1), ("1x1", 5)),
        ),
        output=(0, 3, 4, 6),
    ),
    reduction=CellGenotype(
        pairs=(
            (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
            (("identity", 2), ("3x3", 1)),
            (("1x7_7x1", 2), ("max_pool_3x3", 2)),
            (("identity", 3), ("max_pool_2x2", 1)),
            (("avg_pool_3x3", 2), ("1x1", 3)),
        ),
        output=(4, 5, 6),
    ),
)


def genotype(variant: Variant) -> Genotype:
    """The cells of AmoebaNet-B or AmoebaNet-D.

    Raises:
        ValueError: any other variant.
    """
    match variant:
        case "b":
            return AMOEBANET_B
        case "d":
            return AMOEBANET_D
        case _:
            raise ValueError(f"model.variant={variant}: use b (AmoebaNet-B) or d (AmoebaNet-D)")
