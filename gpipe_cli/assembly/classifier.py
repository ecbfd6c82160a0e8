"""Which tensors of a model are its classifier: those that paper section 4 initialises anew for every data set.

The paper takes "all but the last softmax layer" from a trained model. Our layers are not cut like that: AmoebaNet has a
second classifier in the middle, and the last layer of an EfficientNet also has a convolution that is worth taking. So
the classifier is the tensors whose shape depends on the number of classes.
"""

from dataclasses import replace

from torch import nn

from gpipe_cli.assembly.build import build_model
from gpipe_cli.config.dataset import ImagesConfig
from gpipe_cli.config.model import CustomConfig
from gpipe_cli.config.settings import TrainConfig


def classifier_of(config: TrainConfig, model: nn.Sequential) -> frozenset[str]:
    """The names of the classifier's tensors in `model`, which was built for `config`.

    Found by building the model for one class, or token, more. An embedding changes with the vocabulary too, so of a
    model of text only the last layer is searched. Which argument of a user's function is the number of classes is not
    known: of a user's model it is the last module that has parameters.
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
