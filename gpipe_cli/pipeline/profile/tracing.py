"""What each layer costs and what crosses each boundary, from shapes alone (paper section 2.1: the cost estimate c_i).

The model is on the meta device: nothing is allocated, nothing is computed, and every process gets the same figures
without a handshake. FLOPs are counted forward and backward (as Lingvo's `FPropMeta`, `lingvo/core/gpipe.py`, does for
the forward), as are the bytes that autograd saves: `forward_trace.py`, `backward_trace.py`. Two micro-batch sizes are
traced, from which the costs for any other size follow: `size_fit.py`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from gpipe_cli.models.skips import find_skips
from gpipe_cli.pipeline.profile.backward_trace import trace_backward
from gpipe_cli.pipeline.profile.carried_skips import carry_skips_through
from gpipe_cli.pipeline.profile.forward_trace import (
    ForwardTracer,
    Loss,
    describe_layers,
    weights_as_on_stage,
    weights_on,
)
from gpipe_cli.pipeline.profile.layer_cost import LayerCost
from gpipe_cli.pipeline.profile.operation_counter import Fuses, cpu_fuses
from gpipe_cli.pipeline.profile.size_fit import TRACED_SIZES, fit_cost
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.runtime.deferred_batch_norm import batch_norm_deferred
from gpipe_cli.pipeline.runtime.frozen import set_training
from gpipe_cli.system.hidden_gpus import hidden_gpus

_RECORDS_WITHOUT_GPU = "2.11"  # older torch records no graph of a GPU's tensors without a driver


@hidden_gpus()
def trace_layers(
    model: nn.Sequential,
    inputs: Boundary,
    *,
    training: bool,
    lengths: Sequence[int] = (),
    loss: Loss | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    autocast_dtype: torch.dtype | None = None,
    device: str = "cpu",
    fuses: Fuses = cpu_fuses,
    splits: bool = False,
    kinds: Sequence[Hashable] = (),
) -> tuple[LayerCost, ...]:
    """The cost and the boundary of every layer of a model on the meta device; without `training` no backward.

    `inputs` describes what the first layer gets; `lengths` are the maximum lengths that sentences are padded to, and
    costs are for such a sample. Frozen layers cost less: they have no gradients of weights, and no backward if nothing
    before them is trained. `loss`, computed from the last layer's outputs (on the meta device, of any number of
    samples), counts as part of the last layer. Images and the model's weights have `memory_format`, as in training: a
    layer that flattens images copies channels-last ones. Afterwards the weights' format is as before, as the order in
    which initial values are drawn depends on it. Layers compute in `autocast_dtype` where autocast on `device`, `cpu`
    or `cuda`, uses it; `fuses` says when attention is a single kernel. With `splits` the backward is also traced in two
    halves. `kinds` are the layers' `layer_kinds`, if known. Hides the GPUs from a process that has used none.

    Raises InputError if a layer does not accept what the previous one returns, has an unknown batch norm or reads a
    parameter that would not be trained, and ChangedInputError if a layer changes its input in place in training.
    """
    set_training(model, training)
    layers = describe_layers(model, kinds)
    first_size = TRACED_SIZES[0]
    shapes_device, backward_device = _trace_devices(device, autocast_dtype)
    with weights_as_on_stage(model, memory_format, device) as old_owner, batch_norm_deferred(model):
        tracer = ForwardTracer(layers, inputs, memory_format, autocast_dtype, fuses, old_owner)
        for where in dict.fromkeys((shapes_device, backward_device)):
            with weights_on(model, where):
                runs = [tracer.trace(where, samples, lengths, graph=training, loss=loss) for samples in TRACED_SIZES]
                if where == shapes_device:
                    forwards = runs + [
                        tracer.trace(where, first_size, [length - (i == at) for i, length in enumerate(lengths)])
                        for at in range(len(lengths))
                    ]
                if where == backward_device:
                    backwards = [trace_backward(layers, sized, memory_format if splits else None) for sized in runs]
    cost = cache(partial(fit_cost, lengths))  # equal layers share their runs, and so their cost
    traced = zip(*backwards, *forwards, strict=True)
    costs = [replace(cost(*layer_runs), name=layer.name) for layer, layer_runs in zip(layers, traced, strict=True)]
    return carry_skips_through(costs, inputs, find_skips(model))


def _trace_devices(device: str, autocast_dtype: torch.dtype | None) -> tuple[str, str]:
    """The devices on which the forward (for shapes and types) and the backward are traced, for training on `device`.

    Autocast has no rules for the meta device. A backward on cuda needs a GPU, which may be missing: its operations are
    a CPU's. So are types with an older torch; a boundary whose type differs on the GPU then ends the run.
    """
    if autocast_dtype is None:
        return "meta", "meta"
    return "cpu" if torch.__version__ < _RECORDS_WITHOUT_GPU else device, "cpu"


def run_shapes(
    model: nn.Sequential,
    inputs: Boundary,
    lengths: Sequence[int] = (),
    memory_format: torch.memory_format = torch.contiguous_format,
    kinds: Sequence[Hashable] = (),
) -> None:
    """Run one forward of a single sample in training mode on the meta device; `kinds` as in `trace_layers`.

    Raises InputError, which names the layer, if a layer fails, as batch norm does with a single value per channel.
    """
    set_training(model, True)
    layers = describe_layers(model, kinds)
    with batch_norm_deferred(model):
        ForwardTracer(layers, inputs, memory_format).trace("meta", 1, lengths)
