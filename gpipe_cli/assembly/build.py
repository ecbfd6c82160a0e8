"""Builds the model and the data that settings describe: the only module that knows every kind of model by name."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from operator import call
from typing import Any, Literal, cast

import torch
from torch import nn

from gpipe_cli.config import groups
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.batches import NO_OUTPUT_LABELS, OutputLabels, SplitIndex, derive_seed
from gpipe_cli.data.images import check_headers, find_images, open_images
from gpipe_cli.data.masked_text import MaskedText
from gpipe_cli.data.splits import Splits
from gpipe_cli.data.text import SyntheticText, TextSplit, open_text
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import PAD
from gpipe_cli.errors import format_value
from gpipe_cli.models import hugging_face
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.custom import build_custom
from gpipe_cli.models.preprocessing import Preprocessing, hugging_face_preprocessing, timm_preprocessing
from gpipe_cli.models.skips import SkipSequential
from gpipe_cli.models.timm_models import build_timm
from gpipe_cli.models.transformer import transformer_lm, transformer_nmt
from gpipe_cli.models.unet import unet
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor
from gpipe_cli.pipeline.runtime.randomness import mix, seed_generator
from gpipe_cli.system.uncompiled import avoid_dynamo_import

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def build_model(config: TrainConfig, *, pretrained: bool = False, share_equal_layers: bool = False) -> nn.Sequential:
    """The whole model on the meta device: names and shapes of its layers without memory. Raises InputError.

    `pretrained`: its layers, if they can be initialised separately, will load the weights that the settings name.
    `share_equal_layers`: cells of AmoebaNet and layers of our Transformers that are made alike are a single module, at
    several places of the sequence. That is enough for shapes, and a thousand layers take no longer to build than ten.
    """
    weights = pretrained and isinstance(config.model, groups.HuggingFaceConfig)
    if not config.compile:
        avoid_dynamo_import()
    with torch.device("meta"):
        return _model(config, weights=weights, make=cache(call) if share_equal_layers else call)


def full_model_builder(config: TrainConfig, *, pretrained: bool) -> Callable[[], nn.Sequential] | None:
    """A function that builds the whole model with its initial values; None if layers can be initialised separately.

    Models of timm and of users set their initial values while they are built, so every process builds the whole model
    once, from the same seed, and keeps the layers of its stages. `pretrained`: load the weights that the settings name.
    """
    if isinstance(config.model, groups.CustomConfig | groups.ResNetConfig | groups.TimmConfig):
        return cache(lambda: _model(config, weights=pretrained))
    return None


def user_model(config: TrainConfig, values: Mapping[str, torch.Tensor]) -> nn.Sequential:
    """The model as its function returns it, to be called as a whole: a weight that several layers use is one parameter.
    Parameters and buffers that are in `values` under any of their names take value, device and strides from there."""
    seed_generator(torch.device("cpu"), mix(config.seed))  # the seed of every process that builds the whole model
    model = _model(config, weights=False)
    device = next((value.device for value in values.values()), torch.device("cpu"))
    needed = {name.partition(".")[0] for name in values}
    for name, layer in model.named_children():
        tensors = [*layer.parameters(), *layer.buffers()]
        if (name in needed or not tensors) and not any(tensor.is_meta for tensor in tensors):
            layer.to(device)  # and not only the `values`: a layer may keep other tensors, and move them itself
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if name not in values:
            continue
        value = values[name].detach()
        if tensor.is_meta:  # of Hugging Face, whose layers are initialised separately
            value = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            torch.utils.swap_tensors(tensor, value)
        elif tensor.stride() == value.stride() and 0 not in value.stride():
            tensor.detach().copy_(value)  # in place: a layer may keep views of it
        else:
            tensor.data = value  # an expanded tensor cannot be written, and other strides have to be taken over
    return SkipSequential(OrderedDict(model.named_children()))  # nn.Sequential's own forward knows no skips


def _model(config: TrainConfig, *, weights: bool, make: Callable[..., Any] = call) -> nn.Sequential:
    """Call the model's function with the model's settings as arguments; `weights`: they may be pretrained; `make` calls
    the class of each layer that a model of ours may have often."""
    model, dataset = config.model, config.dataset
    settings = {field.name: getattr(model, field.name) for field in fields(model)}
    name = settings.pop("name")
    match model, dataset:
        case groups.CustomConfig(), _:
            return build_custom(model.target, model.arguments or {})
        case groups.HuggingFaceConfig(), _:
            return _of_hugging_face(config, model, pretrained=model.pretrained and weights)
        case groups.AmoebaNetConfig(), groups.ImagesConfig():
            del settings["auxiliary_weight"]  # a setting of the loss
            classes = dataset.model_classes
            return amoebanet(image_size=dataset.image_size, num_classes=classes, make=make, **settings)
        case groups.UNetConfig(), groups.ImagesConfig():
            return unet(image_size=dataset.image_size, num_classes=dataset.num_classes, **settings)
        case (groups.ResNetConfig() | groups.TimmConfig(), groups.ImagesConfig()):
            if isinstance(model, groups.ResNetConfig):
                del settings["depth"]
            elif not weights:
                settings |= {"pretrained": False, "weights": None}
            name = timm_name(model)
            return build_timm(name, num_classes=dataset.model_classes, image_size=dataset.image_size, **settings)
        case groups.TransformerLMConfig(), groups.TextConfig():
            return transformer_lm(vocabulary=dataset.vocabulary, make=make, **settings)
        case groups.TransformerNMTConfig(), groups.TextConfig():
            return transformer_nmt(vocabulary=dataset.vocabulary, pad=PAD, make=make, **settings)
    raise AssertionError(f"model={name} cannot learn from dataset={dataset.name}; the settings were not checked")


def _of_hugging_face(config: TrainConfig, model: groups.HuggingFaceConfig, *, pretrained: bool) -> nn.Sequential:
    """The data set decides what a model of Hugging Face is for, and of plain text its family."""
    source = replace(model, pretrained=pretrained)
    match config.dataset:
        case groups.ImagesConfig() as images:
            return hugging_face.image_classifier(source, num_classes=images.model_classes, image_size=images.image_size)
        case groups.TextConfig(vocabulary=vocabulary) if config.task == "translation":
            return hugging_face.translation_model(source, vocabulary=vocabulary, length=model.length, pad=PAD)
        case groups.TextConfig(vocabulary=vocabulary):
            masked = hugging_face.is_masked(source)
            build = hugging_face.masked_language_model if masked else hugging_face.language_model
            return build(source, vocabulary=vocabulary, length=model.length)


def pretrained_classes(config: TrainConfig) -> tuple[str, ...] | None:
    """The names, by output, of the classes of a pretrained classifier of Hugging Face that training begins with; None
    if there is none, or its config.json names none."""
    model = config.model
    if not isinstance(model, groups.HuggingFaceConfig) or not model.pretrained or config.task != "classification":
        return None
    names = hugging_face.read_config(model).id2label
    unnamed = {number: f"LABEL_{number}" for number in range(len(names))}  # transformers' own default
    return None if names == unnamed else tuple(format_value(names[number]) for number in sorted(names))


def preprocessing_of(config: TrainConfig) -> Preprocessing | None:
    """How the images were scaled on which the pretrained weights of a model were trained; None without such weights,
    and if it is not recorded. Raises InvalidSettingError if it cannot be read."""
    match config.model, config.dataset:
        case groups.TimmConfig() as model, groups.ImagesConfig() if model.pretrained or model.weights is not None:
            return timm_preprocessing(model.name, model.weights)
        case groups.HuggingFaceConfig(pretrained=True) as model, groups.ImagesConfig():
            return hugging_face_preprocessing(model)
    return None


def timm_name(model: groups.ResNetConfig | groups.TimmConfig) -> str:
    """The name under which timm knows the model."""
    return f"resnet{model.depth}" if isinstance(model, groups.ResNetConfig) else model.name


def model_inputs(config: TrainConfig) -> Boundary:
    """The first layer's inputs: images (N, 3, S, S), tokens (N, S), or source (N, S) and target tokens (N, T)."""
    if isinstance(config.dataset, groups.ImagesConfig):
        size = config.dataset.image_size
        return (BoundaryTensor((0, 3, size, size), (1, 0, 0, 0), torch.float32, False),)
    dimensions = len(max_lengths(config))
    # the second dimension of input i is length i
    grows = [tuple((0, int(column == row)) for column in range(dimensions)) for row in range(dimensions)]
    return tuple(BoundaryTensor((0, 0), (1, 0), torch.int64, False, per_length) for per_length in grows)


def max_lengths(config: TrainConfig) -> tuple[int, ...]:
    """The maximum length, in tokens, of each of the first layer's inputs; () for images."""
    if isinstance(config.dataset, groups.ImagesConfig):
        return ()
    length = config.model.length  # type: ignore[union-attr]  # the settings were checked: a text model
    assert length is not None
    return (length,) * (2 if config.task == "translation" else 1)


# `precision` -> dtype of autocast, None without autocast; tf32 only changes how a GPU multiplies float32.
AUTOCAST_DTYPE: dict[str, torch.dtype | None] = {"float32": None, "tf32": None, "bfloat16": torch.bfloat16}


def memory_format_of(config: TrainConfig) -> Literal["contiguous", "channels_last"]:
    """The memory format of images and of an image model's weights: a key of MEMORY_FORMATS."""
    if config.memory_format != "auto":
        return config.memory_format
    # convolutions are faster in channels_last, on CPUs too (by half: gpipe check against=torch); where they are not, on
    # GPUs in float32, a rule has replaced `auto` (`commands/prepare_run.py`)
    return "contiguous" if config.text else "channels_last"


def outputs_of(config: TrainConfig) -> int:
    """The number of logits per element: classes, or tokens of the vocabulary."""
    dataset, model = config.dataset, config.model
    if isinstance(dataset, groups.ImagesConfig):
        return dataset.model_classes
    if isinstance(model, groups.HuggingFaceConfig):
        return int(hugging_face.read_config(model).vocab_size)  # its own, which may be larger
    return dataset.vocabulary


def targets_of(config: TrainConfig, samples: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the targets of `samples` samples of these lengths: (N,), (N, T) or (N, S, S)."""
    dataset = config.dataset
    if isinstance(dataset, groups.ImagesConfig) and dataset.masks:
        return samples, dataset.image_size, dataset.image_size
    return samples, *lengths[-1:]


def find_data(
    config: TrainConfig, output_labels: OutputLabels = NO_OUTPUT_LABELS, *, with_headers: bool = False
) -> Splits[SplitIndex]:
    """The catalogue of each split, without torchvision's transforms, whose import takes seconds. Arguments and errors
    as of `open_data`; `with_headers`: also check the headers of image files."""
    if isinstance(config.dataset, groups.ImagesConfig):
        images = find_images(config.dataset, config.seed, output_labels)
        if with_headers:
            check_headers(config.dataset, images)
        return images.map(lambda samples: SplitIndex(len(samples.targets)))
    return open_data(config, output_labels).map(lambda split: split.split_index)


def open_data(config: TrainConfig, output_labels: OutputLabels = NO_OUTPUT_LABELS) -> Splits[Any]:
    """Each split, a `Split`; `output_labels`: of the weights that the run begins with. Raises InputError."""
    if isinstance(config.dataset, groups.ImagesConfig):
        return open_images(config.dataset, config.seed, output_labels)
    length = max_lengths(config)[0]
    pairs = config.task == "translation"
    saved_model = output_labels.vocabulary
    splits = open_text(config.dataset, length=length, seed=config.seed, pairs=pairs, saved_model=saved_model)
    masked = isinstance(config.model, groups.HuggingFaceConfig) and hugging_face.is_masked(config.model)
    if isinstance(splits.training, PairSplit) or not masked:
        return splits
    named = cast(Splits[TextSplit | SyntheticText], splits).each()
    return Splits(*(MaskedText(part, derive_seed(f"masks of the {name} text", config.seed)) for name, part in named))
