"""The learning rate as a pure function of the step: what a resumed run needs to know is the step and nothing else."""

from gpipe_cli.config import PaperLearningRateConfig


def learning_rate(config: PaperLearningRateConfig, step: int, steps_per_epoch: int, batch_size: int) -> float:
    """The learning rate of step number `step`, counted from 0 over the whole run.

    The paper's decay (v4, "Training and results on ImageNet"): 0.00125 x mini-batch size, times 0.97 every 3 epochs, in
    steps. `batch_size` is the whole mini-batch: neither partitions nor micro-batches enter. The warm-up rises linearly.
    Departs from the paper: TensorFlow's warm-up begins at exactly zero, which wastes a step; here step 0 has 1/n of it.
    """
    initial = config.per_sample * batch_size
    warm_up_steps = round(config.warmup_epochs * steps_per_epoch)
    if step < warm_up_steps:
        return initial * (step + 1) / warm_up_steps
    # whole steps: 3 epochs are exactly 3 * steps_per_epoch steps; a quotient of floats could fall just short of it
    decay_steps = max(1, round(config.every_epochs * steps_per_epoch))
    return float(initial * config.decay ** (step // decay_steps))
