"""Initial values of the layers of a model of transformers: each layer sets its own, so that no process needs them all.

Pretrained values lie in safetensors files beside config.json, in one or in shards with an index. A layer reads its own
tensors by name and nothing else. Names in old files differ from those in the model; transformers knows the renamings.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gpipe_cli.config.typed import RefusedError, with_type
from gpipe_cli.errors import InputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights:
    """The tensors of a model's files, by the names that they have in the model; `name`: a folder, or one on the hub."""

    def __init__(self, name: str, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.name = name
        self._renamings = get_model_conversion_mapping(model)
        self._prefix, self._names = model.base_model_prefix, dict.fromkeys(model.state_dict(), True)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The tensors with these names. Raises InputError if a file cannot be read, lacks one, or it has another
        shape."""
        found = {}
        for name, shape in shapes.items():
            if name not in self._places:
                use = "use a folder that has it, or model.pretrained=false"
                raise RefusedError("model.pretrained", True, f"{self.name} has no tensor {name}; {use}")
            file, stored = self._places[name]
            with self._opened(file) as tensors:
                if tuple(tensors.get_slice(stored).get_shape()) != shape:
                    has = tuple(tensors.get_slice(stored).get_shape())
                    raise RefusedError(
                        "model.pretrained",
                        True,
                        f"{file} of {self.name} has {stored} of shape {has}, and the model {shape}; "
                        "use the config.json that belongs to it",
                    )
                found[name] = tensors.get_tensor(stored)
        return found

    @cached_property
    def _places(self) -> dict[str, tuple[str, str]]:
        """The model's name of each tensor -> the file that has it, and its name there."""
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        if (index := self._find(INDEX)) is not None:
            files = json.loads(index.read_text("utf-8"))["weight_map"]
        else:
            with self._opened(SINGLE) as tensors:
                files = dict.fromkeys(tensors.keys(), SINGLE)
        renamings = [one for one in self._renamings if isinstance(one, WeightRenaming)]
        places = {}
        for stored, file in files.items():
            name, _ = rename_source_key(stored, renamings, [], self._prefix, self._names)
            places[name] = file, stored
        return places

    def _opened(self, file: str) -> Any:
        path = self._find(file)
        if path is None:
            use = "give a folder that has it, or use model.pretrained=false"
            raise RefusedError("model.pretrained", True, f"{self.name} has no file {file}; {use}")
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot be read as safetensors ({with_type(error)}); fetch it anew") from error

    def _find(self, file: str) -> Path | None:
        from transformers.utils import cached_file

        # a process that needs a file of the hub fetches it, once for all processes of a machine
        found = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)


@dataclass(frozen=True)
class InitialValues:
    """How the layers of a model get their values.

    initialiser: has transformers' `_init_weights` for the model. tied: name of a tied parameter -> that of its owner.
    weights: None if values are drawn.
    """

    initialiser: Any
    tied: Mapping[str, str]
    weights: Weights | None

    @classmethod
    def of(cls, model: Any, weights: Weights | None) -> "InitialValues":
        # `_init_weights` reads only the configuration: with the whole model each layer would hold all others
        initialiser: Any = object.__new__(type(model))
        nn.Module.__init__(initialiser)
        initialiser.config = model.config
        return cls(initialiser, dict(model.all_tied_weights_keys), weights)

    def set(self, layer: nn.Module) -> None:
        """Set all parameters and buffers of a layer, whose modules have the paths that they have in the model.

        transformers' initialisation also sets buffers that no file has, such as rotary tables, and leaves alone what is
        marked as loaded.
        """
        loaded = {} if self.weights is None else layer.state_dict(keep_vars=True)
        if self.weights is not None:
            owners = {name: self.tied.get(name, name) for name in loaded}
            tensors = self.weights.read({owners[name]: tuple(tensor.shape) for name, tensor in loaded.items()})
            for name, tensor in loaded.items():
                tensor.copy_(tensors[owners[name]])
                tensor._is_hf_initialized = True
        for part in layer.children():
            part.apply(self.initialiser._init_weights)
        for tensor in loaded.values():
            del tensor._is_hf_initialized
