"""The learning rate of each step, as a pure function of the step's number."""

import math

from gpipe_cli.config import groups


def learning_rate(
    config: groups.LearningRateConfig, step: int, steps_per_epoch: int, batch_size: int | None, total_steps: int = 1
) -> float:
    """The learning rate of step number `step`, counted from 0 over the whole run of `total_steps`.

    The paper's decay (v4, "Training and results on ImageNet"): 0.00125 x mini-batch size, times 0.97 every 3 epochs (a
    staircase). Warm-ups are linear. Departs from the paper: TensorFlow's warm-up begins at exactly zero, which wastes a
    step; with n warm-up steps, step 0 here has 1/n of the full rate.
    """
    warm_up = warm_up_steps(config, steps_per_epoch)
    match config:
        case groups.PaperLearningRateConfig():
            assert batch_size is not None  # None if mini-batches are counted in tokens, where no rate is per sample
            initial = config.per_sample * batch_size
            # whole steps: 3 epochs are exactly 3 * steps_per_epoch steps; a quotient of floats could fall just short
            decay_steps = max(1, round(config.every_epochs * steps_per_epoch))
            after = float(initial * config.decay ** (step // decay_steps))
        case groups.InverseSqrtLearningRateConfig():
            initial = config.peak
            after = initial * math.sqrt(warm_up / (step + 1))
        case groups.CosineLearningRateConfig():
            initial = config.peak
            done = min(1.0, (step - warm_up) / max(1, total_steps - warm_up))
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            after = initial * (config.final_share + (1 - config.final_share) * cosine)
        case groups.ConstantLearningRateConfig():
            initial = after = config.peak
    return initial * (step + 1) / warm_up if step < warm_up else after


def warm_up_steps(config: groups.LearningRateConfig, steps_per_epoch: int) -> int:
    """The number of steps over which the learning rate rises."""
    if isinstance(config, groups.InverseSqrtLearningRateConfig):
        return config.warmup_steps
    return round(config.warmup_epochs * steps_per_epoch)
