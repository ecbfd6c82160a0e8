"""The language model of Table 1: the sizes that the paper prints, and what it refuses."""

import pytest
import torch

from gpipe_cli.models.transformer_lm import transformer_lm


def closed_form(layers: int, width: int, hidden: int, vocabulary: int) -> int:
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * hidden + hidden + width
    norm = 2 * width
    ends = vocabulary * width + norm + width * vocabulary + vocabulary
    return layers * (attention + feed_forward + 2 * norm) + ends


@pytest.mark.parametrize(
    ("layers", "printed"), [(3, "282.2M"), (13, "785.8M"), (103, "5.3B"), (415, "21.0B"), (1663, "83.9B")]
)
def test_table_1(layers: int, printed: str) -> None:
    with torch.device("meta"):
        model = transformer_lm(layers=layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == closed_form(layers, 2048, 8192, 32000)
    unit = 1e6 if printed.endswith("M") else 1e9
    assert f"{parameters / unit:.1f}{printed[-1]}" == printed


def test_layout() -> None:
    model = transformer_lm(layers=2, width=8, hidden=8, heads=2, vocabulary=10, length=4)
    assert [name for name, _ in model.named_children()] == ["embedding", "layer_000", "layer_001", "softmax"]
    assert model(torch.zeros(3, 4, dtype=torch.int64)).shape == (3, 4, 10)


def test_it_learns_to_repeat() -> None:
    """A sequence that repeats the token before: solved within a few steps, so gradients point the right way."""
    torch.manual_seed(0)
    model = transformer_lm(layers=1, width=16, hidden=32, heads=2, vocabulary=8, length=6, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.tensor(0.0)
    for _ in range(60):
        tokens = torch.randint(0, 8, (16, 6))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, r"model\.layers=0: use 1 or more"),
        ({"width": 7}, r"model\.width=7: .* use 6 or 8"),
        ({"heads": 3}, r"model\.width=8 does not divide among model\.heads=3"),
        ({"vocabulary": 0}, r"model\.vocabulary=0"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0: .* less than 1"),
        ({"attention_dropout": -0.1}, r"model\.attention_dropout=-0\.1"),
    ],
)
def test_refused(settings: dict[str, float], message: str) -> None:
    arguments = {"layers": 1, "width": 8, "hidden": 8, "heads": 2, "vocabulary": 10, "length": 4}
    with pytest.raises(ValueError, match=message) as caught:
        transformer_lm(**{**arguments, **settings})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
