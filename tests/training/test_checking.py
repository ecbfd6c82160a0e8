"""What `gpipe check` is made of: layers are watched, bits are compared, shared parameters are kept together."""

from dataclasses import replace

import custom_models
import pytest
import torch
from torch import nn
from training_runs import TINY, configure

from gpipe_cli.reporting.check_report import CheckReport, Finding, Row
from gpipe_cli.training.differences import Digests, Variant, differs, first_difference, within
from gpipe_cli.training.digests import digest
from gpipe_cli.training.layout import make_layout
from gpipe_cli.training.probes import Probed, find_in_place, probe_layers
from gpipe_cli.training.sharing import SeparatedError, check_cut, shared_parameters

CUSTOM = ["model=custom", "dataset.image_size=8", *TINY[2:3], *TINY[4:]]


def probed(model: nn.Sequential) -> Probed:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, 8, 8, generator=generator)
    return probe_layers(model, (images,), torch.device("cpu"), torch.contiguous_format)


def test_digests_are_of_bits_and_not_of_places() -> None:
    tensor = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert digest((tensor,)) == digest((tensor.to(memory_format=torch.channels_last),))
    assert digest((tensor,)) != digest((tensor.reshape(2, 1, 3, 4),))
    assert digest((tensor,)) != digest((tensor.double(),))
    changed = tensor.clone()
    changed[0, 1, 2, 3] = torch.nextafter(changed[0, 1, 2, 3], torch.tensor(torch.inf))
    assert digest((tensor,)) != digest((changed,))


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (custom_models.works_in_place(), "in_place", "use inplace=False"),
        (custom_models.scales_in_place(), "in_place", "use inplace=False"),
        (custom_models.draws_elsewhere("random"), "random", "draws from Python's random module"),
        (custom_models.draws_elsewhere("numpy"), "random", "draws from numpy.random"),
        (custom_models.draws_elsewhere("generator"), "state", "a source that torch's seed does not rule"),
        (custom_models.counts(), "state", "it keeps something between calls"),
        (custom_models.tracks(), "state", "changes its own seen"),
    ],
)
def test_the_layer_that_cannot_be_pipelined_is_named(model: nn.Sequential, kind: str, words: str) -> None:
    found = probed(model).findings
    assert [(finding.kind, finding.layer) for finding in found] == [(kind, "1")]
    assert words in found[0].text


def test_layers_that_can_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert probed(model) == Probed((), draws=True)
    assert probed(model.eval()) == Probed((), draws=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_probe_ends_where_a_layer_raises() -> None:
    model = nn.Sequential(nn.Flatten(), custom_models.LookUp(2, 2), nn.ReLU(inplace=True))
    assert probed(model).findings == ()


def test_in_place_is_seen_without_values() -> None:
    config = configure(*CUSTOM, "model.target=custom_models:works_in_place")
    from gpipe_cli.training.build import build_model, model_inputs

    found = find_in_place(build_model(config), model_inputs(config), ())
    assert [finding.layer for finding in found] == ["1"]


def test_shared_parameters_stay_in_one_partition() -> None:
    shared = shared_parameters(custom_models.shares())
    assert [(one.first_name, one.second_name, one.parameter) for one in shared] == [("1", "2", "weight")]
    check_cut(shared, (5,))
    check_cut(shared, (3, 2))
    check_cut(shared, (1, 2, 2))
    with pytest.raises(SeparatedError, match=r"layers 1 and 2 share parameter weight.*balance=\[1,4\]") as refused:
        check_cut(shared, (2, 3))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("partitions", [2, 3, 4])
def test_the_remedy_for_a_separated_parameter_is_one(partitions: int) -> None:
    """Whatever two of five layers share it, the balance in the message is a cut that keeps them together."""
    for first in range(4):
        for second in range(first + 1, 5):
            layers = [nn.Linear(2, 2) for _ in range(5)]
            layers[second].bias = layers[first].bias
            shared = shared_parameters(nn.Sequential(*layers))
            sizes = [1] * (partitions - 1) + [6 - partitions]
            for place in range(partitions):  # every balance with one large partition
                balance = [1] * partitions
                balance[place] = sizes[-1]
                try:
                    check_cut(shared, balance)
                except SeparatedError as error:
                    remedy = str(error).rpartition("; ")[2]
                    if "partition.balance" in remedy:
                        wanted = [int(size) for size in remedy.rpartition("[")[2].rstrip("]").split(",")]
                        assert len(wanted) == partitions
                        assert sum(wanted) == 5
                        assert min(wanted) > 0
                        check_cut(shared, wanted)
                    else:
                        fewest = first + (5 - second - 1) + 1
                        assert f"use partitions={fewest} or fewer" in remedy
                        assert fewest < partitions


def test_a_training_refuses_to_separate_them() -> None:
    settings = [*CUSTOM, "model.target=custom_models:shares", "executor=in_process"]
    make_layout(configure(*settings, "partitions=2", "partition.balance=[3,2]"))
    with pytest.raises(ValueError, match="share parameter weight"):
        make_layout(configure(*settings, "partitions=2", "partition.balance=[2,3]"))


def test_a_module_has_one_place() -> None:
    with pytest.raises(ValueError, match="layers 2 and 4 are the same module"):
        make_layout(configure(*CUSTOM, "model.target=custom_models:repeats_a_module", "partitions=1"))


def variant() -> Variant:
    config = configure(*CUSTOM, "model.target=custom_models:small", "partitions=2", "partition.balance=[5,3]")
    return Variant(make_layout(config), 3, "gpipe", "always", "in_process")


def test_the_first_difference_is_where_it_began() -> None:
    layout = variant().layout
    names = ("0", "1", "7")
    reference = Digests(
        1.0,
        outputs={(name, m): "" for name in names for m in range(2)},
        gradients={"0.weight": "", "1.shift": "", "7.weight": ""},
        statistics={"2.running_mean": ""},
        weights={"0.weight": "", "1.shift": "", "7.weight": ""},
    )
    same = replace(reference, again=dict(reference.outputs))
    assert first_difference(layout, same, reference) is None

    def first(**changed: object) -> tuple[str, int, int, str]:
        found = first_difference(layout, replace(same, **changed), reference)  # type: ignore[arg-type]
        assert found is not None
        return found.layer, found.stage, found.micro_batch, found.name

    outputs, gradients = reference.outputs, reference.gradients
    # forwards, in the order of the layers
    assert first(outputs=outputs | {("7", 0): "x", ("1", 1): "x"}, loss=2.0) == ("1", 0, 1, "")
    # then what is run again
    assert first(again=outputs | {("1", 1): "x"}, gradients=gradients | {"7.weight": "x"}) == ("1", 0, 1, "")
    # backwards, from the loss
    assert first(gradients={"0.weight": "x", "7.weight": "x"}) == ("7", 1, 0, "7.weight")
    # a gradient that there is no more
    assert first(gradients={"0.weight": "", "7.weight": ""}) == ("1", 0, 0, "1.shift")
    assert first(statistics={"2.running_mean": "x"}, weights={"7.weight": "x"}) == ("2", 0, 0, "2.running_mean")
    found = first_difference(layout, replace(same, again=outputs | {("1", 1): "x"}), reference)
    assert found is not None
    row = differs(variant(), found, 0.5)
    assert (row.verdict, row.layer, row.stage, row.micro_batch) == ("differs", "1", 0, 1)
    assert row.text == "layer 1 gives other values when micro-batch 1 is recomputed"


@pytest.mark.parametrize(
    ("difference", "verdict"), [(0.0, "identical"), (3.1e-7, "within tolerance"), (1.1e-5, "differs")]
)
def test_another_order_of_sums_has_a_tolerance(difference: float, verdict: str) -> None:
    assert within(variant(), difference).verdict == verdict


@pytest.mark.parametrize("difference", [float("nan"), float("inf")])
def test_not_a_number_is_not_within(difference: float) -> None:
    row = within(variant(), difference)
    assert (row.verdict, row.difference) == ("differs", None)  # JSON has no such numbers
    assert "not finite" in row.text


def test_the_verdict_counts_what_was_compared() -> None:
    rows = (
        Row(1, 3, "gpipe", "never", "in_process", "reference"),
        Row(2, 3, "gpipe", "never", "in_process", "identical"),
        Row(2, 3, "gpipe", "never", "distributed", "left out", text="no GPU"),
    )
    report = CheckReport(rows, (), 2.3026, {})
    assert report.identical
    assert report.verdict.endswith("(1 variant, loss 2.3026)")
    bad = replace(report, rows=(*rows, Row(2, 3, "1f1b", "never", "in_process", "differs", layer="stem")))
    assert not bad.identical
    assert bad.verdict == "differs: 1 of 2 variants; first in layer stem"
    # what no bit of this mini-batch shows can still be wrong
    unruled = replace(report, findings=(Finding("random", "noise", "layer noise draws from numpy.random"),))
    assert not unruled.identical
    assert unruled.verdict == "differs: layer noise draws from numpy.random"
    warned = replace(report, findings=(Finding("in_place", "relu", "layer relu changes its input in place"),))
    assert warned.identical
    assert warned.warnings == warned.findings
