"""Initial values of the layers of a model of transformers: each layer sets its own, so that no process needs them all.

Pretrained values are next to config.json, in a safetensors file, or in several with an index. A layer reads only its
tensors, by name. Names in old files differ from the model's; transformers knows the renamings.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gpipe_cli.errors import InputError, InvalidSettingError, describe_error

ADAPTER = "default"  # peft's name of a module's only adapter
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights:
    """The tensors of a model's files, by their names in the model.

    name: a folder, or a name on the hub. classifier: a module of the model that is loaded only if it fits, "" for none.
    """

    def __init__(self, name: str, model: Any, classifier: str = "") -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.name = name
        self._classifier = classifier and f"{classifier}."
        self._renamings = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self._names = dict.fromkeys(model.state_dict(), True)

    def read(self, like: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
        """Values for the tensors in `like`, without the classifier's if any of these has another shape.

        tied: name of a tied weight -> its owner's name; a file may have either, or both if they are equal. Raises
        InputError if a file cannot be read, lacks a tensor, or has it in another shape.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in like.items()}
        classifier = [name for name in shapes if self._classifier and name.startswith(self._classifier)]
        left_out = classifier if any(self._shape(name) != shapes[name] for name in classifier) else []
        values = {}
        for name in [name for name in shapes if name not in left_out]:
            names = [candidate for candidate in (tied.get(name), name) if candidate in self._tensor_locations] or [name]
            values[name], *others = (self._tensor(candidate, shapes[name]) for candidate in names)
            if not all(torch.equal(values[name], other) for other in others):
                why = f"{names[0]} and {name}, which are tied, differ in the files of {self.name}"
                use = "use 'model.config={tie_word_embeddings: false}'"
                raise InvalidSettingError("model.pretrained", True, f"{why}; {use}")
        return values

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor in its file; None if no file has it."""
        if name not in self._tensor_locations:
            return None
        file, stored_name = self._tensor_locations[name]
        with self._open(file) as tensors:
            return tuple(tensors.get_slice(stored_name).get_shape())

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if (stored_shape := self._shape(name)) is None:
            use = "use a folder that has it, or model.pretrained=false"
            raise InvalidSettingError("model.pretrained", True, f"{self.name} has no tensor {name}; {use}")
        file, stored_name = self._tensor_locations[name]
        if stored_shape != shape:
            why = f"{file} of {self.name} has {stored_name} of shape {stored_shape}, and the model {shape}"
            raise InvalidSettingError("model.pretrained", True, f"{why}; use the settings of its config.json")
        with self._open(file) as tensors:
            tensor: Tensor = tensors.get_tensor(stored_name)
            return tensor

    @cached_property
    def _tensor_locations(self) -> dict[str, tuple[str, str]]:
        """The model's name of each tensor -> the file that has it, and its name there."""
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        if (index := find_file(self.name, INDEX)) is not None:
            try:
                files = dict(json.loads(index.read_text("utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"{index}: not an index of files ({describe_error(error)}); fetch it again") from error
        else:
            with self._open(SINGLE) as tensors:
                files = dict.fromkeys(tensors.keys(), SINGLE)
        renamings = [renaming for renaming in self._renamings if isinstance(renaming, WeightRenaming)]
        places = {}
        for stored_name, file in files.items():
            name, _ = rename_source_key(stored_name, renamings, [], self._prefix, self._names)
            places[name] = file, stored_name
        return places

    def _open(self, file: str) -> Any:
        path = find_file(self.name, file)
        if path is None:
            use = "give a folder that has it, or use model.pretrained=false"
            raise InvalidSettingError("model.pretrained", True, f"{self.name} has no file {file}; {use}")
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            why = f"cannot be read as safetensors ({describe_error(error)}); fetch it again"
            raise InputError(f"{path}: {why}") from error


def adapters_in(layer: nn.Module) -> Iterator[Any]:
    """peft's LoraLayers, each a linear module with its adapter."""
    return (module for module in layer.modules() if hasattr(module, "reset_lora_parameters"))


def _without_adapters(layer: nn.Module) -> dict[str, Tensor]:
    """The tensors of a layer, or of several, by their names without peft's adapters."""
    named = layer.state_dict(keep_vars=True).items()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in named if ".lora_" not in name}


def find_file(name: str, file: str) -> Path | None:
    """A file in a folder or on the hub, None if there is none. Raises InvalidSettingError for any other failure."""
    from transformers.utils import cached_file

    # a process that needs a file of the hub fetches it, once for all processes of a machine
    try:
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # whatever the hub's client and the libraries below it raise
        why = f"{file} of {name} cannot be loaded ({describe_error(error).partition('; ')[0]})"
        use = "give a folder that has it as model.name, or use model.pretrained=false"
        raise InvalidSettingError("model.pretrained", True, f"{why}; {use}") from error
    return None if path is None else Path(path)


class InitialValues:
    """How the layers of a model get their values: from `weights`, or drawn if that is None."""

    def __init__(self, model: Any, weights: Weights | None) -> None:
        # `_init_weights` reads only the configuration: with the whole model each layer would hold all others
        self.initialiser: Any = object.__new__(type(model))
        nn.Module.__init__(self.initialiser)
        self.initialiser.config = model.config
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)  # name of a tied parameter -> its owner's name
        self.weights = weights

    def set(self, layer: nn.Module) -> None:
        """Set all parameters and buffers of a layer, whose modules have their paths in the model.

        transformers' initialisation also sets buffers that no file has, such as rotary tables, and skips tensors that
        are marked as loaded.
        """
        tensors: dict[str, Any] = {**_without_adapters(layer)}
        loaded = []
        for name, owner in self.tied.items():
            if name in tensors and owner in tensors:  # the allocation of the layer has separated them
                path, _, last = name.rpartition(".")
                setattr(layer.get_submodule(path), last, tensors[owner])
                tensors[name] = tensors[owner]
        if self.weights is not None:
            for name, value in self.weights.read(tensors, self.tied).items():
                tensor = tensors[name]
                tensor.copy_(value)
                tensor._is_hf_initialized = True
                loaded.append(tensor)
        for part in layer.children():
            part.apply(self.initialiser._init_weights)
        for adapter in adapters_in(layer):
            adapter.reset_lora_parameters(ADAPTER, True)
        for tensor in loaded:
            vars(tensor).pop("_is_hf_initialized", None)  # a tied tensor is in the list twice


def as_transformers(layers: nn.Sequential) -> Any:
    """transformers' whole model, with the tensors of the chain `layers` after merging its adapters."""
    initial: InitialValues = layers[0].initial  # type: ignore[assignment]  # layers are pieces of the model
    with torch.device("meta"):
        model = type(initial.initialiser)(copy.deepcopy(initial.initialiser.config))
    for adapter in adapters_in(layers):
        adapter.merge()
    tensors = {name.partition(".")[2]: tensor for name, tensor in _without_adapters(layers).items()}
    # a tied weight whose owner is in no layer
    tensors |= {owner: tensors[tied] for tied, owner in initial.tied.items() if owner not in tensors}
    model.load_state_dict({name: tensors[name].detach() for name in model.state_dict()}, assign=True)
    return model
