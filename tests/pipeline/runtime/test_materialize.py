from collections import OrderedDict

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline.runtime.materialize import materialize

CPU = torch.device("cpu")


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


def weights(run_seed: int = 0) -> dict[str, torch.Tensor]:
    return materialize(model(), 0, 5, run_seed=run_seed, device=CPU).state_dict()


def test_weights_depend_on_seed_and_name() -> None:
    whole, other = weights(), weights(run_seed=1)
    assert not torch.equal(whole["stem.0.weight"], other["stem.0.weight"])
    assert not torch.equal(whole["twin_a.weight"], whole["twin_b.weight"])


def test_only_the_own_layers_become_real() -> None:
    described = model()
    stage = materialize(described, 2, 2, run_seed=0, device=CPU)
    assert [name for name, _ in stage.named_children()] == ["twin_a", "twin_b"]
    assert all(value.device == CPU for value in stage.state_dict().values())
    assert all(value.is_meta for name, value in described.state_dict().items() if not name.startswith("twin"))


def test_every_value_is_set() -> None:
    """Memory that `to_empty` hands out holds what was there before: buffers too must be initialised."""
    state = weights()
    assert torch.equal(state["stem.1.running_mean"], torch.zeros(4))
    assert torch.equal(state["stem.1.running_var"], torch.ones(4))
    assert torch.equal(state["stem.1.weight"], torch.ones(4))
    assert int(state["stem.1.num_batches_tracked"]) == 0
    bound = 1 / (3 * 9) ** 0.5  # of torch's convolutions
    assert 0 < float(state["stem.0.weight"].detach().abs().max()) <= bound


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))


@pytest.mark.parametrize(("layer", "where"), [(Bare, "odd"), (lambda: nn.Sequential(nn.ReLU(), Bare()), "odd.1")])
def test_a_layer_that_cannot_initialise_itself_is_named(layer: type[nn.Module], where: str) -> None:
    with torch.device("meta"):
        described = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), odd=layer()))
    with pytest.raises(ValueError, match=rf"layer {where} \(Bare\) has parameters or buffers but no reset_parameters"):
        materialize(described, 1, 1, run_seed=0, device=CPU)
    materialize(described, 0, 1, run_seed=0, device=CPU)  # none of this process's business
