"""How the images were scaled on which published weights were trained: other scaling makes their predictions worse.

timm keeps this with the names of its weights, Hugging Face in a file next to them, `gpipe export` in the file itself.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_cli.config.groups import HuggingFaceConfig
from gpipe_cli.errors import InvalidSettingError, describe_error
from gpipe_cli.models.hugging_face import read_config
from gpipe_cli.models.hugging_face_weights import find_file

PREPROCESSOR = "preprocessor_config.json"
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers, which Hugging Face writes


class Preprocessing(NamedTuple):
    """The scaling of images that weights expect, under the names of `ImagesConfig`; `weights` names them."""

    weights: str
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str


def timm_preprocessing(name: str, weights: str | None) -> Preprocessing | None:
    """For timm's weights `name`, or the file `weights`: only our exports contain it, others are assumed to be timm's.
    None for a name that timm does not know."""
    if weights is not None and (exported := _exported_preprocessing(Path(weights))) is not None:
        return exported
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(name)
    if config is None:
        return None
    whole_name = f"{config.architecture}.{config.tag}" if config.tag else str(config.architecture or name)
    return Preprocessing(whole_name, config.input_size[-1], config.mean, config.std, config.interpolation)


def _exported_preprocessing(file: Path) -> Preprocessing | None:
    """What `gpipe export` has written into a file; None for any other file. An unreadable file is refused when its
    weights are loaded."""
    import torch
    from safetensors import safe_open

    with suppress(Exception):  # whatever the readers of either format raise
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                texts = tensors.metadata()
            facts = texts | {key: json.loads(texts[key]) for key in ("image_size", "mean", "std")}
        else:
            facts = torch.load(file, mmap=True, weights_only=True)["metadata"]
        interpolation = facts.get("interpolation", "bilinear")  # files of earlier versions do not have it
        return Preprocessing(str(file), facts["image_size"], (*facts["mean"],), (*facts["std"],), interpolation)
    return None


def hugging_face_preprocessing(source: HuggingFaceConfig) -> Preprocessing | None:
    """By the preprocessor next to the weights, as transformers reads it; None if there is none. If it scales pixels to
    another range than [0, 1], or does not normalize, mean and deviation are changed to the same effect. Raises the
    errors of `read_config`, and InvalidSettingError for a preprocessor that cannot be read."""
    read_config(source)
    if find_file(source.name, PREPROCESSOR) is None:
        return None
    from transformers import AutoImageProcessor

    try:
        reader: Any = AutoImageProcessor.from_pretrained(source.name, trust_remote_code=False)
        size = dict(reader.crop_size if getattr(reader, "do_center_crop", False) else reader.size)
        pixels = int(size.get("height") or size["shortest_edge"])
        factor = 255 * (reader.rescale_factor if reader.do_rescale else 1)
        means, deviations = (reader.image_mean, reader.image_std) if reader.do_normalize else ([0.0] * 3, [1.0] * 3)
        mean, std = (tuple(value / factor for value in values) for values in (means, deviations))
    except Exception as error:  # whatever transformers raises for a file that holds anything
        why = f"its {PREPROCESSOR} cannot be used ({describe_error(error)}); correct it, or use model.pretrained=false"
        raise InvalidSettingError("model.name", source.name, why) from error
    names = {number: name for name, number in RESAMPLE.items()}
    interpolation = names.get(reader.resample, f"Pillow's number {reader.resample}")
    return Preprocessing(source.name, pixels, mean, std, interpolation)
