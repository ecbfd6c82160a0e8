"""A model as an ONNX file, by torch's own exporter (`torch.onnx.export`, dynamo), tested with onnxruntime.

torch.export turns Python numbers computed by a model into constants, so a file that claims to take batches of any size
may not do so. Each file is therefore run on inputs of sizes other than those traced, and compared with the model.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpipe_cli.assembly.build import max_lengths, model_inputs, outputs_of
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.errors import InvalidSettingError, describe_error
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_tuple, as_value
from gpipe_cli.units import size

# A file is a Protocol Buffers message of at most 2 GiB: https://protobuf.dev/programming-guides/proto-limits
MAX_BYTES = 2**31 - 2**20  # of tensors; 1 MiB is left for the rest of the file
INPUT_NAMES = {
    "classification": ("images",),
    "segmentation": ("images",),
    "language_model": ("tokens",),
    "translation": ("source", "target"),
}
TOLERANCE = 1e-3  # greatest difference of a logit, as a fraction of the largest logit
_MAX_SHOWN_CHARACTERS = 200  # characters of a library's error that are shown


def onnx_content(
    config: TrainConfig, model: nn.Sequential, metadata: Mapping[str, str], threads: int
) -> tuple[bytes, bool]:
    """The ONNX file of `model` (in evaluation mode, on the CPU), and whether it takes batches of any size or only of 1.

    Raises InvalidSettingError for a model that cannot be exported.
    """
    key, use = "format", "use format=safetensors"
    if (needed := sum(tensor.nbytes for tensor in model.state_dict().values())) > MAX_BYTES:
        raise InvalidSettingError(key, "onnx", f"a file holds at most 2 GiB, the model has {size(needed)}; {use}")
    why = ""
    for any_batch in (True, False):
        try:
            content = _export(config, model, metadata, any_batch=any_batch)
            why = _describe_difference(config, model, content, threads, any_batch=any_batch)
        except Exception as error:  # from torch.export, the exporter, onnxruntime or the user's layers
            while error.__cause__ is not None:
                error = error.__cause__  # type: ignore[assignment]  # the exporter's text is pages long
            why = describe_error(error)[:_MAX_SHOWN_CHARACTERS]
        if not why:
            return content, any_batch
    raise InvalidSettingError(key, "onnx", f"this model cannot be exported ({why}); {use}")


def _export(config: TrainConfig, model: nn.Sequential, metadata: Mapping[str, str], *, any_batch: bool) -> bytes:
    names = INPUT_NAMES[config.task]
    lengths = ["length"] if len(names) == 1 else [f"{name}_length" for name in names]
    varying: list[dict[int, str]] = []
    for spec in model_inputs(config):
        grows = {
            dimension: name
            for name, slopes in zip(lengths, spec.per_length, strict=False)
            for dimension, slope in enumerate(slopes)
            if slope
        }
        varying.append({0: "batch", **grows} if any_batch else grows)
    # torch.export treats a size of 1 as a constant
    examples = _example_inputs(config, 2 if any_batch else 1, max_lengths(config))
    with warnings.catch_warnings(action="ignore"):  # about shared names, and about plans of torch
        program = torch.onnx.export(
            model,
            (as_value(examples),),
            dynamic_shapes=(varying[0] if len(varying) == 1 else tuple(varying),),
            input_names=list(names),
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    assert program is not None, "as dynamo=True"
    program.model.metadata_props.update(metadata)
    return bytes(program.model_proto.SerializeToString())


def _describe_difference(
    config: TrainConfig, model: nn.Sequential, content: bytes, threads: int, *, any_batch: bool
) -> str:
    """How onnxruntime's logits differ from the model's, for sizes other than those traced; "" if they do not."""
    shorter = tuple(length - length // 3 for length in max_lengths(config))
    inputs = _example_inputs(config, 3 if any_batch else 1, shorter)
    with torch.no_grad():
        wanted = as_tuple(model(as_value(inputs)))[0]
    logits = onnx_program(content, threads)[1](inputs)[0]
    if logits.shape != wanted.shape:
        return f"its logits have shape {tuple(logits.shape)} instead of {tuple(wanted.shape)}"
    difference, largest = (logits - wanted).abs().max().item(), wanted.abs().max().item()
    if difference <= TOLERANCE * largest:
        return ""
    return f"a logit differs by {difference:.2g}, the largest is {largest:.2g}"


def _example_inputs(config: TrainConfig, samples: int, lengths: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = [(spec.shape(samples, lengths), spec.dtype) for spec in model_inputs(config)]
    return tuple(
        torch.rand(shape, generator=generator)
        if dtype.is_floating_point
        else torch.randint(1, outputs_of(config), shape, generator=generator)
        for shape, dtype in shapes
    )


def onnx_program(file: Path | bytes, threads: int) -> tuple[str, Callable[[Tensors], Tensors]]:
    """The name and version of onnxruntime, and a function from inputs on the CPU to the outputs of the file's model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # fatal only: onnxruntime also raises the errors that it logs
    path_or_content = str(file) if isinstance(file, Path) else file
    session = onnxruntime.InferenceSession(path_or_content, options, providers=["CPUExecutionProvider"])
    names = [spec.name for spec in session.get_inputs()]
    one_by_one = session.get_inputs()[0].shape[0] == 1

    def outputs_of_session(inputs: Tensors) -> Tensors:
        if one_by_one and len(inputs[0]) > 1:
            samples = zip(*(tensor.split(1) for tensor in inputs), strict=True)
            parts = [outputs_of_session(sample) for sample in samples]
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))
        arrays = {name: np.ascontiguousarray(tensor) for name, tensor in zip(names, inputs, strict=True)}
        outputs: list[Any] = session.run(None, arrays)
        return tuple(torch.from_numpy(output) for output in outputs)

    return f"onnxruntime {onnxruntime.__version__}", outputs_of_session
