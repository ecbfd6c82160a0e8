"""The learning rates in closed form."""

import pytest

from gpipe_cli.assembly.learning_rate import learning_rate, warm_up_steps
from gpipe_cli.config.optimizer import (
    ConstantLearningRateConfig,
    CosineLearningRateConfig,
    InverseSqrtLearningRateConfig,
    LearningRateConfig,
    PaperLearningRateConfig,
)


def config(every_epochs: float = 3) -> PaperLearningRateConfig:
    return PaperLearningRateConfig("paper", 0.00125, decay=0.97, every_epochs=every_epochs, warmup_epochs=0)


@pytest.mark.parametrize("steps_per_epoch", [1, 49])
def test_a_staircase_that_steps_at_epoch_borders(steps_per_epoch: int) -> None:
    for epoch in range(0, 30):
        expected = 0.00125 * 1024 * 0.97 ** (epoch // 3)
        for step in {epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch - 1}:
            assert learning_rate(config(), step, steps_per_epoch, 1024) == pytest.approx(expected, rel=1e-12)


def test_the_border_of_a_fraction_of_an_epoch() -> None:
    """2.4 epochs of 10 steps are 24 steps, though 24 / 10 / 2.4 is not quite 1 in floats for every such number."""
    rates = [learning_rate(config(2.4), step, 10, 1) for step in range(73)]
    assert [step for step in range(1, 73) if rates[step] != rates[step - 1]] == [24, 48, 72]


def test_the_inverse_square_root() -> None:
    """Vaswani et al.: both branches of the minimum meet at the peak, which is the last step of the warm-up."""
    settings = InverseSqrtLearningRateConfig("inverse_sqrt", peak=0.2, warmup_steps=40)
    for step in range(500):
        expected = 0.2 * 40**0.5 * min((step + 1) * 40**-1.5, (step + 1) ** -0.5)
        assert learning_rate(settings, step, 10, 8, 500) == pytest.approx(expected, rel=1e-12)


def test_the_cosine_goes_from_the_peak_to_its_final_share() -> None:
    settings = CosineLearningRateConfig("cosine", peak=0.4, warmup_epochs=2, final_share=0.1)
    rates = [learning_rate(settings, step, 10, 8, 100) for step in range(101)]
    assert rates[:20] == pytest.approx([0.4 * (step + 1) / 20 for step in range(20)])
    assert [rates[20], rates[60], rates[100]] == pytest.approx([0.4, 0.5 * (0.4 + 0.04), 0.04])
    assert rates[20:] == sorted(rates[20:], reverse=True)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (PaperLearningRateConfig("paper", per_sample=0.05, decay=0.97, every_epochs=3, warmup_epochs=1), 10),
        (InverseSqrtLearningRateConfig("inverse_sqrt", peak=0.4, warmup_steps=40), 40),
        (CosineLearningRateConfig("cosine", peak=0.4, warmup_epochs=2, final_share=0.1), 20),
        (ConstantLearningRateConfig("constant", peak=0.4, warmup_epochs=0.5), 5),
    ],
)
def test_the_warm_up_ends_where_the_rate_is_highest(settings: LearningRateConfig, steps: int) -> None:
    """What the banner says: not the rate of the first step, which is a small part of it."""
    assert warm_up_steps(settings, 10) == steps
    rates = [learning_rate(settings, step, 10, 8, 100) for step in range(100)]
    assert rates[max(0, steps - 1)] == pytest.approx(0.4) == pytest.approx(max(rates))
    assert rates[:steps] == sorted(rates[:steps])
    if isinstance(settings, ConstantLearningRateConfig):
        assert set(rates[steps:]) == {0.4}
