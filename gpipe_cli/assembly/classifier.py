"""Which tensors of a model are its classifier: the ones that paper section 4 draws anew for every data set.

The paper takes "all but the last softmax layer". A layer is more than that: AmoebaNet has a second classifier in the
middle, and the last layer of an EfficientNet also has a convolution that is worth taking. So the classifier is not a
layer but the tensors whose shape depends on the number of classes.
"""

from dataclasses import replace

from torch import nn

from gpipe_cli.assembly.build import build_model
from gpipe_cli.config.dataset import ImagesConfig
from gpipe_cli.config.model import CustomConfig
from gpipe_cli.config.settings import TrainConfig


def classifier_of(config: TrainConfig, model: nn.Sequential) -> frozenset[str]:
    """The names of the classifier's tensors in `model`, which is what `config` describes.

    Found by building the model for one class, or token, more: an embedding changes with the vocabulary too, but only
    the last layer of a model of text is its classifier. The functions of users do not say which of their arguments
    are classes: of their models it is the last module that has parameters.
    """
    if isinstance(config.model, CustomConfig):
        *_, last = (name.rpartition(".")[0] for name, _ in model.named_parameters())
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
