"""Finds the layers and parameters that `freeze=...` names. Paper section 4 fine-tunes everything; freezing is cheaper.

Patterns match names of layers, of modules inside them, or of parameters. They are resolved once, before the workers
start, so that all processes freeze the same parameters and know which boundaries gradients cross.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from gpipe_cli.assembly.build import build_model
from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.config.groups import CustomConfig, HuggingFaceConfig, ImagesConfig
from gpipe_cli.config.settings import BACKBONE, TrainConfig
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.pipeline.runtime.frozen import Frozen
from gpipe_cli.pipeline.runtime.tied_weights import find_ties


def find_frozen(config: TrainConfig, model: nn.Sequential) -> Frozen:
    """The modules and parameters of `model` that `config.freeze` names. Raises InputError if a pattern matches nothing
    (with the nearest name), or if nothing is left to train."""
    patterns = config.freeze
    if not patterns:
        return Frozen()
    module_names = [name for name, _ in model.named_modules() if name]
    parameter_names = [name for name, _ in model.named_parameters()]
    modules: set[str] = set()
    parameters: set[str] = set()
    for pattern in patterns:
        if pattern == BACKBONE:
            classifier = classifier_of(config, model)
            partly = {holder for name in classifier for holder in _holders(name)}
            whole = sorted({holder for name in model.state_dict() for holder in _holders(name)} - partly)
            single = [name for name in parameter_names if name not in classifier]
        else:
            whole = [name for name in module_names if fnmatchcase(name, pattern)]
            single = [name for name in parameter_names if fnmatchcase(name, pattern)]
        if not whole and not single:
            names = [*module_names, *parameter_names]
            hint = suggest_nearest(pattern, names) or f"; the layers are {', '.join(dict(model.named_children()))}"
            raise InvalidSettingError("freeze", patterns, f"no layer, module or parameter is called {pattern}{hint}")
        modules |= {*whole}
        parameters |= {*single}
    for tie in find_ties(model):  # a tied weight that is frozen in one layer is frozen in all
        uses = {name for names in tie.uses for name in names}
        if uses & parameters or any(not modules.isdisjoint(_holders(name)) for name in uses):
            parameters |= uses
    outermost = tuple(name for name in module_names if name in modules and modules.isdisjoint(_holders(name)))
    named = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    alone = tuple(name for name in named if name in parameters and modules.isdisjoint(_holders(name)))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in alone}
    if not any(modules.isdisjoint(_holders(name)) for name in trained):
        *_, last = (name for name, _ in model.named_children())
        raise InvalidSettingError("freeze", patterns, f"nothing is left to train; remove at least {last}, the last")
    return Frozen(outermost, alone)


def classifier_of(config: TrainConfig, model: nn.Sequential) -> frozenset[str]:
    """The names of the classifier's tensors in `model`, which was built for `config`.

    The paper (section 4) takes "all but the last softmax layer" from a trained model. Our layers are cut differently:
    AmoebaNet has an auxiliary classifier in the middle, and the last layer of an EfficientNet also has a convolution
    worth taking. So the classifier consists of the tensors whose shapes depend on the number of classes.

    To find them, the model is built again with an additional class or token. In a text model only the last layer is
    searched, as embeddings also change with the vocabulary. A user's function may take the number of classes by any
    argument, and a model of Hugging Face has its own vocabulary, so their classifier is the last module with
    parameters, tied weights included.
    """
    if isinstance(config.model, CustomConfig | HuggingFaceConfig):
        *_, last = (name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False))
        return frozenset(f"{last}.{name}" for name in model.get_submodule(last).state_dict())
    dataset = config.dataset
    if isinstance(dataset, ImagesConfig):
        wider = replace(config, dataset=replace(dataset, classes=None, num_classes=dataset.model_classes + 1))
        searched = model.state_dict()
    else:
        wider = replace(config, dataset=replace(dataset, vocabulary=dataset.vocabulary + 1))
        last = next(reversed(dict(model.named_children())))
        searched = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(f"{last}.")}
    other = build_model(wider).state_dict()
    return frozenset(name for name, tensor in searched.items() if other[name].shape != tensor.shape)


def _holders(name: str) -> list[str]:
    """The names of all modules that contain the module or tensor `name`, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]
