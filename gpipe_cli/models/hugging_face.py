"""Models of Hugging Face's transformers as chains: the paper's claim that any network that is a sequence of layers can
be partitioned (section 1), for the models of today.

transformers runs a model's blocks in a loop inside one forward. Here each block is a layer, made of the model's own
modules, and what the loop hands to all of them, masks and rotary tables, is computed in every layer anew by the model's
own functions: only hidden states travel. The chain computes what the model computes, bit for bit.

    embedding  block_000 ... block_{L-1}  head

The whole model exists on the meta device only. A layer sets its own values, from the files beside config.json or by
transformers' own initialisation (`hugging_face_weights.py`). Tied weights are one parameter in two layers.

transformers describes where a model can be cut (`base_model_pp_plan`), but not what its forward does between the parts:
some families scale embeddings or logits there. So each family is listed here once it has been compared.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gpipe_cli.config.typed import RefusedError, nearest, with_type
from gpipe_cli.models.hugging_face_layers import DecoderBlock, Head, Piece, TokenEmbedding
from gpipe_cli.models.hugging_face_weights import InitialValues, Weights

# Family, `model_type` in config.json -> modules of the embedding, the list of blocks, the norm after the last one.
_LIKE_LLAMA = ("embed_tokens", "layers", "norm")
LANGUAGE_MODELS = {
    "gpt2": ("wte wpe drop", "h", "ln_f"),
    "llama": _LIKE_LLAMA,
    "mistral": _LIKE_LLAMA,
    "qwen2": _LIKE_LLAMA,
    "qwen3": _LIKE_LLAMA,
}
_VARYING_TABLES = ("dynamic", "longrope")  # rotary tables that change with the longest sequence seen


def language_model(
    name: str,
    *,
    vocabulary: int,
    length: int,
    pretrained: bool = False,
    config: Mapping[str, Any] | None = None,
    attention: str = "eager",
) -> nn.Sequential:
    """A causal language model as a chain of layers: tokens (N, S), int64 -> logits (N, S, tokens of the model).

    Call it on the meta device; every layer then has `initialise_weights`.

    Args:
        name: a folder with config.json, or a name on the hub.
        vocabulary: token ids of the data, at most those of the model.
        length: the largest S, at most the positions that the model has.
        pretrained: initial values come from the safetensors files beside config.json.
        config: replaces settings of config.json.
        attention: transformers' implementation, "eager" or "sdpa".

    Raises InputError for a configuration that cannot be read, a family that is no chain here, and data that do not fit.
    """
    settings = read_config(name, config)
    if settings.model_type not in LANGUAGE_MODELS:
        known = ", ".join(LANGUAGE_MODELS)
        why = f"transformers' family {settings.model_type} has no chain of layers for text; use one of {known}"
        raise RefusedError("model.name", name, why)
    if vocabulary > settings.vocab_size:
        why = f"{name} knows {settings.vocab_size} tokens; use {settings.vocab_size} or fewer"
        raise RefusedError("dataset.vocabulary", vocabulary, why)
    if length > settings.max_position_embeddings:
        why = f"{name} has {settings.max_position_embeddings} positions; use as many or fewer"
        raise RefusedError("model.length", length, why)
    rope_type = (getattr(settings, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in _VARYING_TABLES:
        why = f"its rotary positions, {rope_type}, depend on sequences seen before; use model.config to choose others"
        raise RefusedError("model.name", name, why)
    from transformers import AutoModelForCausalLM

    model = _on_meta(AutoModelForCausalLM, settings, attention)
    embedding, blocks, norm = LANGUAGE_MODELS[settings.model_type]
    base = model.base_model_prefix
    initial = InitialValues.of(model, Weights(name, model) if pretrained else None)
    layers: dict[str, Piece] = {
        "embedding": TokenEmbedding(model, initial, [f"{base}.{path}" for path in embedding.split()])
    }
    for index in range(len(model.get_submodule(f"{base}.{blocks}"))):
        layers[f"block_{index:03d}"] = DecoderBlock(model, initial, f"{base}.{blocks}.{index}")
    layers["head"] = Head(model, initial, [f"{base}.{norm}", "lm_head"])
    return _chain(name, model, layers)


def read_config(name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """A model's PretrainedConfig, with `changes`. Raises RefusedError if it cannot be had, or knows no such setting."""
    try:
        from transformers import AutoConfig, logging
    except ImportError as error:
        why = "needs the package transformers; install it by pip install 'gpipe-cli[transformers]'"
        raise RefusedError("model", "hf", why) from error
    logging.set_verbosity_error()  # of special tokens beyond a small vocabulary, in every process
    try:
        settings = AutoConfig.from_pretrained(name)
        known = settings.to_dict()
        if unknown := [key for key in changes or () if key not in known]:
            hint = nearest(unknown[0], [*known]) or f"; its settings are those of {type(settings).__name__}"
            raise RefusedError(f"model.config.{unknown[0]}", (changes or {})[unknown[0]], f"no such setting{hint}")
        return AutoConfig.from_pretrained(name, **(changes or {}))
    except RefusedError:
        raise
    except Exception as error:  # whatever transformers, the hub's client and the checks of a configuration raise
        why = f"no configuration of a model of transformers ({with_type(error).partition('; ')[0]})"
        raise RefusedError("model.name", name, f"{why}; give a folder with its config.json") from error


def vocabulary_of(name: str, config: Mapping[str, Any] | None) -> int:
    """The number of logits per token: `vocab_size` in config.json, or in `config`. Raises InputError."""
    return int(read_config(name, config).vocab_size)


def _on_meta(auto: Any, settings: Any, attention: str) -> Any:
    """The model of a configuration, without memory, in training mode, in float32."""
    settings.use_cache = False
    with torch.device("meta"):
        return auto.from_config(settings, attn_implementation=attention, dtype=torch.float32).train()


def _chain(name: str, model: nn.Module, layers: Mapping[str, Piece]) -> nn.Sequential:
    """The layers as a sequence. Raises RefusedError if the model has tensors that no layer has."""
    sequence = nn.Sequential()
    for layer, module in layers.items():
        sequence.add_module(layer, module)
    if forgotten := _tensors(model) ^ {path.partition(".")[2] for path in _tensors(sequence)}:
        why = f"has tensors that the chain of its family does not know, such as {min(forgotten)}"
        raise RefusedError("model.name", name, f"{why}; use another model of the family")
    return sequence


def _tensors(model: nn.Module) -> set[str]:
    """The names of all parameters, tied ones under every name, and buffers, persistent or not."""
    both = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name for tensors in both for name, _ in tensors}
