"""What a process reads: images where the first stage lives, targets where the last one does, sizes everywhere."""

import sys

import torch
from torch import nn

from gpipe_cli.config import TrainConfig
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.images import ImageSplit
from gpipe_cli.data.loading import ImageBatches, default_workers, load_images
from gpipe_cli.pipeline.layer_cost import run_shapes
from gpipe_cli.pipeline.micro_batch import micro_batch_sizes
from gpipe_cli.training.build import model_inputs
from gpipe_cli.training.checkpoint import Progress
from gpipe_cli.training.layout import usable_cores

# Forking a process that has no threads yet is safe and takes milliseconds; elsewhere than on Linux libraries object.
START_METHOD = "fork" if sys.platform == "linux" else "forkserver"


class Loaders:
    """Two loaders for the whole run, prefetching across epochs: one of training images, one of all coming
    evaluations."""

    def __init__(self, config: TrainConfig, training: ImageSplit, test: ImageSplit, start: Progress) -> None:
        workers = workers_of(config)
        batches = training_batches(config, len(training))
        pin = config.device != "cpu" and torch.cuda.device_count() > 0
        self.training: ImageBatches = load_images(
            training,
            batches,
            start.epoch,
            start.position,
            config.epochs,
            workers,
            pin_memory=pin,
            start_method=START_METHOD,
        )
        test_batches = MiniBatches(len(test), config.batch_size, config.seed, shuffle=False)
        self.test: ImageBatches = load_images(test, test_batches, 0, 0, config.epochs + 1, workers, pin, START_METHOD)

    def close(self) -> None:
        self.training.close()
        self.test.close()


def training_batches(config: TrainConfig, samples: int) -> MiniBatches:
    """The mini-batches of a training set. Raises ValueError if it is smaller than one."""
    if config.batch_size > samples:
        raise ValueError(
            f"batch_size={config.batch_size}: the training set has only {samples} samples; use {samples} or fewer"
        )
    return MiniBatches(samples, config.batch_size, config.seed, shuffle=True)


def refuse_single_samples(config: TrainConfig, model: nn.Sequential, batches: MiniBatches) -> None:
    """Batch norm cannot train on one value per channel: a micro-batch of one sample, where the map is 1x1."""
    last = batches.size(0, batches.steps_per_epoch - 1)
    for samples in {config.batch_size, last}:
        if micro_batch_sizes(samples, config.micro_batches)[-1] == 1:
            try:
                run_shapes(model, model_inputs(config))
            except ValueError as error:
                raise ValueError(
                    f"micro_batches={config.micro_batches}: a mini-batch of {samples} samples has micro-batches of one "
                    f"sample, which this model cannot train on ({error}); use fewer micro_batches or another batch_size"
                ) from error


def workers_of(config: TrainConfig) -> int:
    """Loader processes: what was asked for, or what suits the data set."""
    if config.data_workers is not None:
        return config.data_workers
    return default_workers(config.dataset.name, usable_cores())


def test_targets_of(test: ImageSplit | None, batches: MiniBatches, epoch: int, last: bool) -> list[torch.Tensor]:
    """The targets of every test mini-batch; where the last stage is elsewhere, only their number matters."""
    positions = range(batches.steps_per_epoch)
    if test is not None and last:
        return [test.targets[batches.indices(epoch, position)] for position in positions]
    return [torch.empty(batches.size(epoch, position)) for position in positions]
