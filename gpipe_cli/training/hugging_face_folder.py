"""A model of transformers as a folder that `from_pretrained` reads, made by its own `save_pretrained`, with the run's
tokenizer, or with a preprocessor that scales images as the run did."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.data.images import shorter_side
from gpipe_cli.data.vocabulary import PAD
from gpipe_cli.models.hugging_face_weights import as_transformers, find_file
from gpipe_cli.models.preprocessing import RESAMPLE
from gpipe_cli.pipeline.runtime.boundary import Tensors
from gpipe_cli.system.files import replace_file

CONFIG_FILE, GENERATION = "config.json", "generation_config.json"
MAX_SHARD_BYTES = 2**62  # bytes: a single file, as in all other formats


def write_folder(
    source: str, layers: nn.Sequential, folder: Path, more: Mapping[str, bytes], classes: Sequence[str]
) -> int:
    """Write the model to `folder`, next to other files if it exists; returns the number of tensors.

    source: the folder or name that the model came from, which may have settings of generation. more: name -> content of
    further files: a tokenizer's, or the preprocessor. classes: their names, if the model has some and they are known.
    """
    model = as_transformers(layers)
    if classes:
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {name: number for number, name in enumerate(classes)}
    with TemporaryDirectory(prefix=".", dir=folder.parent) as staging:
        model.save_pretrained(staging, max_shard_size=MAX_SHARD_BYTES)
        files = dict(more)
        if model.can_generate() and (saved := find_file(source, GENERATION)) is not None:
            files[GENERATION] = saved.read_bytes()
        for name, content in files.items():
            (Path(staging) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(staging) / name).write_bytes(content)
        # config.json last: no folder without it is read
        written = sorted(Path(staging).rglob("*"), key=lambda path: path.name == CONFIG_FILE)
        for path in [path for path in written if path.is_file()]:
            place = folder / path.relative_to(staging)
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, place)
    return len({parameter.data_ptr() for parameter in model.state_dict().values()})


def preprocessor_config(dataset: ImagesConfig) -> bytes:
    """The file by which transformers scales images as test images of the run are scaled."""
    from transformers import ViTImageProcessor

    reader: Any = ViTImageProcessor(
        size={"shortest_edge": shorter_side(dataset)},
        resample=RESAMPLE[dataset.interpolation],
        do_center_crop=True,
        crop_size={"height": dataset.image_size, "width": dataset.image_size},
        image_mean=list(dataset.mean),
        image_std=list(dataset.std),
    )
    return str(reader.to_json_string()).encode()


def model_class_in(folder: Path) -> Any:
    """transformers' class of the model in a folder."""
    import transformers

    return getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])


def load_program(folder: Path, attention: str, device: torch.device) -> tuple[str, Callable[[Tensors], Tensors]]:
    """The name and version of transformers, and a function from inputs on `device` to the logits of its model in
    evaluation mode. `attention`: the implementation of attention that it uses."""
    import transformers

    model = (
        model_class_in(folder).from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).to(device)
    )

    @torch.no_grad()
    def logits_of(inputs: Tensors) -> Tensors:
        first, *target = inputs
        arguments: dict[str, Any] = {model.main_input_name: first}
        if target:
            arguments |= {"attention_mask": (first != PAD).long(), "decoder_input_ids": target[0]}
        if model.can_generate():  # the cache would lay out keys and values in another way
            arguments["use_cache"] = False
        return (model(**arguments).logits,)

    return f"transformers {transformers.__version__}", logits_of
