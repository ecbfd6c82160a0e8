"""Random numbers and first weights: the same everywhere, whatever the cut."""

import subprocess
import sys
from collections import OrderedDict
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.initial_weights import materialize, seed_of_name
from gpipe_cli.pipeline.runtime.randomness import mix


def test_the_numbers_are_the_same_everywhere() -> None:
    """Fixed: another machine, process or version must resume a run with the same masks."""
    assert mix(1, 2, 3) != mix(3, 2, 1)
    assert seed_of_name(0, "stem") == 0x116912FC65A1F8B5  # as it was first
    # SplitMix64 of a zero state that takes in a zero, computed by hand from its published constants
    state = (0x9E3779B97F4A7C15 * 2) & (2**64 - 1)
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    assert mix(0) == state ^ (state >> 31)


def test_generators_of_a_gpu_are_there_before_anything_else_has_used_it() -> None:
    """The first step of a program looked for them in an empty tuple. Without a GPU the driver is what is missing."""
    program = "import torch; from gpipe_cli.system.accelerator import generators; generators(torch.device('cuda:0'))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "IndexError" not in ended.stderr
    assert (ended.returncode == 0) is torch.cuda.is_available()


def test_neighbours_do_not_collide() -> None:
    """Sums of (step, micro-batch, layer) would: (1, 0, 0) and (0, 1, 0) drew the same masks."""
    seeds = [mix(*values) for values in product(range(2), range(20), range(2), range(8), range(20))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({seed_of_name(run, name) for run in range(9) for name in ("a", "b", "ab", "cell_1", "cell_10")}) == 45


def model() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(
            OrderedDict(
                stem=nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
                relu=nn.ReLU(),
                twin_a=nn.Conv2d(4, 4, 1),
                twin_b=nn.Conv2d(4, 4, 1),
                head=nn.Linear(4, 2),
            )
        )


def test_only_the_own_layers_become_real() -> None:
    described = model()
    stage = materialize(described, 2, 2, run_seed=0)
    assert [name for name, _ in stage.named_children()] == ["twin_a", "twin_b"]
    assert all(value.is_meta for name, value in described.state_dict().items() if not name.startswith("twin"))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))


@pytest.mark.parametrize(("layer", "where"), [(Bare, "odd"), (lambda: nn.Sequential(nn.ReLU(), Bare()), "odd.1")])
def test_a_layer_that_cannot_initialise_itself_is_named(layer: type[nn.Module], where: str) -> None:
    with torch.device("meta"):
        described = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), odd=layer()))
    with pytest.raises(InputError, match=rf"layer {where} \(Bare\) has parameters or buffers but no reset_parameters"):
        materialize(described, 1, 1, run_seed=0)
    materialize(described, 0, 1, run_seed=0)  # none of this process's business
