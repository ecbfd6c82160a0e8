"""Models of Hugging Face's transformers as chains: the paper's claim that any network that is a sequence of layers can
be partitioned (section 1), for the models of today.

transformers runs all blocks in a loop within a single forward. Here each block is a layer, made of the model's modules,
and the arguments that the loop passes to all of them, masks and tables of positions, are computed in every layer by the
model's functions: only hidden states are sent. The chain's results are the model's, bit for bit.

    text, images   embedding  block_000 ... block_{L-1}  head
    translation    embedding  encoder_000 ... encoder_norm  target_embedding  decoder_000 ... head

The whole model exists only on the meta device. A layer sets its values, from the files next to config.json or by
transformers' initialisation (`hugging_face_weights.py`). A tied weight is a single parameter of several layers.

transformers describes where a model can be cut (`base_model_pp_plan`), but not what its forward does between the parts:
some families scale embeddings or logits there. So a family is listed here once its results have been compared.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.config.groups import HuggingFaceConfig, LoraConfig
from gpipe_cli.errors import InvalidSettingError, error_text
from gpipe_cli.models.hugging_face_layers import (
    Block,
    ClassifierHead,
    DecoderBlock,
    EncoderBlock,
    EncoderNorm,
    HFLayer,
    Mask,
    SourceEmbedding,
    TargetEmbedding,
    TokenEmbedding,
    TranslationHead,
)
from gpipe_cli.models.hugging_face_weights import InitialValues, Weights, adapters_in

# Family, `model_type` in config.json -> modules of the embedding, the list of blocks, and what follows the last block.
_LLAMA_MODULES = ("embed_tokens", "layers", "norm")
LANGUAGE_MODELS = {
    "gpt2": ("wte wpe drop", "h", "ln_f"),
    "llama": _LLAMA_MODULES,
    "mistral": _LLAMA_MODULES,
    "qwen2": _LLAMA_MODULES,
    "qwen3": _LLAMA_MODULES,
    "gemma": _LLAMA_MODULES,
    "olmo2": _LLAMA_MODULES,
    "phi3": _LLAMA_MODULES,
    "smollm3": _LLAMA_MODULES,
}
MASKED_LANGUAGE_MODELS = ("bert",)
IMAGE_CLASSIFIERS = ("vit",)
TRANSLATION_MODELS = ("t5",)
ADAPTABLE_CLASSES = ("Linear", "Conv1D")  # classes of modules that can have adapters
_VARYING_TABLES = ("dynamic", "longrope")  # rotary tables that change with the longest sequence seen
# Keys of config.json that transformers takes unchecked, and then divides by or makes tensors of.
_POSITIVE_KEYS = re.compile(
    r"[nd]_\w+|num_((attention|key_value)_)?heads|num_((hidden|decoder)_)?layers|num_channels|head_dim|"
    r"(hidden|intermediate|patch|vocab|type_vocab)_size|max_position_embeddings|relative_attention_\w+"
)
_ACTIVATIONS = ("activation_function", "dense_act_fn", "hidden_act", "hidden_activation")
_NAME_REMEDY = "give a folder with the config.json of a model, or a name on the hub"


def language_model(source: HuggingFaceConfig, *, vocabulary: int, length: int) -> nn.Sequential:
    """A causal language model: tokens (N, S), int64 -> logits (N, S, tokens of the model).

    Like all functions here, it is for the meta device; the layers then have `initialise_weights`. If `source` is
    pretrained, initial values come from the safetensors files next to config.json.

    Args:
        vocabulary: number of the data's token ids, at most the model's.
        length: the largest S, at most the model's positions.

    Raises InputError for a configuration that cannot be read, a family without a chain, and data that does not fit.
    """
    settings = _settings(source, [*LANGUAGE_MODELS], "text")
    _check_text_fits(source, settings, vocabulary, length)
    rope_type = (getattr(settings, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in _VARYING_TABLES:
        why = f"its rotary positions, {rope_type}, depend on sequences seen before; use model.config to choose others"
        raise InvalidSettingError("model.name", source.name, why)
    model, initial = _build_on_meta(source, settings, "AutoModelForCausalLM")
    base = model.base_model_prefix
    embedding, blocks, norm = LANGUAGE_MODELS[settings.model_type]
    layers: dict[str, HFLayer] = {}
    layers["embedding"] = TokenEmbedding(model, initial, [f"{base}.{path}" for path in embedding.split()])
    rotary = f"{base}.rotary_emb" if hasattr(model.base_model, "rotary_emb") else None
    for index in range(settings.num_hidden_layers):
        block = Block(model, initial, f"{base}.{blocks}.{index}", _mask(settings, index), rotary)
        layers[f"block_{index:03d}"] = block
    return _as_sequential(source, model, {**layers, "head": HFLayer(model, initial, [f"{base}.{norm}", "lm_head"])})


def masked_language_model(source: HuggingFaceConfig, *, vocabulary: int, length: int) -> nn.Sequential:
    """A model that predicts masked tokens: tokens (N, S), int64 -> logits (N, S, tokens of the model). Otherwise as
    `language_model`."""
    settings = _settings(source, MASKED_LANGUAGE_MODELS, "masked text")
    _check_text_fits(source, settings, vocabulary, length)
    model, initial = _build_on_meta(source, settings, "AutoModelForMaskedLM")
    layers = {"embedding": HFLayer(model, initial, ["bert.embeddings"])}
    for index in range(settings.num_hidden_layers):
        layers[f"block_{index:03d}"] = Block(model, initial, f"bert.encoder.layer.{index}", "bidirectional")
    return _as_sequential(source, model, {**layers, "head": HFLayer(model, initial, ["cls"])})


def image_classifier(source: HuggingFaceConfig, *, num_classes: int, image_size: int) -> nn.Sequential:
    """A vision Transformer: images (N, 3, S, S) -> logits (N, num_classes). A pretrained classifier for another number
    of classes is not loaded.

    image_size: S, pixels, as in config.json. Otherwise as `language_model`.
    """
    settings = _settings(source, IMAGE_CLASSIFIERS, "images")
    if settings.image_size not in (image_size, [image_size] * 2, (image_size,) * 2):
        use = f"use that, or 'model.config={{image_size: {image_size}}}' for a model of this size"
        why = f"{source.name} takes {settings.image_size} pixels; {use}"
        raise InvalidSettingError("dataset.image_size", image_size, why)
    settings.num_labels = num_classes
    model, initial = _build_on_meta(source, settings, "AutoModelForImageClassification", classifier="classifier")
    layers = {"embedding": HFLayer(model, initial, ["vit.embeddings"])}
    for index in range(settings.num_hidden_layers):
        layers[f"block_{index:03d}"] = Block(model, initial, f"vit.layers.{index}", "bidirectional")
    head = ClassifierHead(model, initial, ["vit.layernorm", "classifier"])
    return _as_sequential(source, model, {**layers, "head": head})


def translation_model(source: HuggingFaceConfig, *, vocabulary: int, length: int, pad: int) -> nn.Sequential:
    """An encoder and a decoder: (source (N, S), target so far (N, T)), both int64 -> logits (N, T, tokens).

    In transformers the first block of each stack makes the biases of relative positions, and the others get them. Here
    every block makes them, from a table that all blocks of a stack share: its few numbers are summed once per step,
    instead of sending (heads, S, S) for each micro-batch and boundary, in both directions. The outputs are
    bit-identical; the table's gradient is summed in another order.

    T5 v1.1 and Flan-T5 have tie_word_embeddings=false and separate logits in their files. transformers unties them once
    it has read the files, here the setting does.

    pad: id of the data's padding token; padded positions of the source are masked. Otherwise as `language_model`.
    """
    settings = _settings(source, TRANSLATION_MODELS, "pairs of sentences")
    _check_text_fits(source, settings, vocabulary, length)
    model, initial = _build_on_meta(source, settings, "AutoModelForSeq2SeqLM")
    if not settings.scale_decoder_outputs:  # what transformers makes of tie_word_embeddings=false
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        initial.tied.pop("lm_head.weight", None)
    initial.tied.update(_share_tables(model))
    layers: dict[str, HFLayer] = {}
    layers["embedding"] = SourceEmbedding(model, initial, ["encoder.embed_tokens", "encoder.dropout"], pad)
    for index in range(settings.num_layers):
        layers[f"encoder_{index:03d}"] = EncoderBlock(model, initial, f"encoder.block.{index}", "bidirectional")
    layers["encoder_norm"] = EncoderNorm(model, initial, ["encoder.final_layer_norm", "encoder.dropout"])
    layers["target_embedding"] = TargetEmbedding(model, initial, ["decoder.embed_tokens", "decoder.dropout"])
    for index in range(settings.num_decoder_layers):
        layers[f"decoder_{index:03d}"] = decoder = DecoderBlock(model, initial, f"decoder.block.{index}", "causal")
        decoder.last = index == settings.num_decoder_layers - 1
    paths = ["decoder.final_layer_norm", "decoder.dropout", "lm_head"]
    layers["head"] = TranslationHead(model, initial, paths, settings.scale_decoder_outputs)
    return _as_sequential(source, model, layers)


def is_masked(source: HuggingFaceConfig) -> bool:
    """Whether a model of text predicts masked tokens, not the next ones. Raises the errors of `read_config`."""
    return read_config(source).model_type in MASKED_LANGUAGE_MODELS


def read_config(source: HuggingFaceConfig) -> Any:
    """A model's PretrainedConfig. Raises InvalidSettingError if it cannot be read, has values of which no model can be
    made, or lacks a setting that `source.config` replaces. No code of a folder or of the hub is run."""
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, PreTrainedConfig, logging
    except ImportError as error:
        why = "needs the package transformers; install it by pip install 'gpipe-cli[transformers]'"
        raise InvalidSettingError("model", "hf", why) from error
    logging.set_verbosity_error()  # no warnings of special tokens beyond a small vocabulary
    logging.disable_progress_bar()
    folder = Path(source.name)
    changes = source.config or {}
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidSettingError("model.name", source.name, f"the folder has no file config.json; {_NAME_REMEDY}")
    try:
        written = PreTrainedConfig.get_config_dict(source.name)[0] | dict(changes)
        for key, value in written.items():
            if rule := _violated_rule(key, value):
                raise _config_error(source, f"{key}={value} must be {rule}")
        unchanged = AutoConfig.from_pretrained(source.name, trust_remote_code=False).to_dict()
        if (unknown := next((key for key in changes if key not in unchanged), None)) is not None:
            hint = suggest_nearest(unknown, [*unchanged]) or "; config.json has them all"
            raise InvalidSettingError(f"model.config.{unknown}", changes[unknown], f"no such setting{hint}")
        settings = AutoConfig.from_pretrained(source.name, trust_remote_code=False, **changes)
    except InvalidSettingError:
        raise
    except StrictDataclassError as error:  # the cause names the key, its value and what is allowed
        raise _config_error(source, error_text(error.__cause__ or error).partition(". ")[0].rstrip(".")) from error
    except Exception as error:  # whatever transformers and the hub's client raise
        why = "has no configuration that transformers knows" if folder.is_dir() else "no such folder, nor on the hub"
        reason = error_text(error).partition("; ")[0].partition(". ")[0]
        raise InvalidSettingError("model.name", source.name, f"{why} ({reason}); {_NAME_REMEDY}") from error
    _check_heads(source, settings, given="head_dim" in written)
    return settings


def _config_error(source: HuggingFaceConfig, what: str) -> InvalidSettingError:
    place = "its config.json, or model.config" if source.config else "its config.json"
    return InvalidSettingError("model.name", source.name, f"{what}; correct that in {place}")


def _violated_rule(key: str, value: Any) -> str:
    """What a key of config.json must be, if `value` is not; only for keys that transformers' errors do not name."""
    if _POSITIVE_KEYS.fullmatch(key) and isinstance(value, int) and value < 1:
        return "1 or more"
    if key == "head_dim" and isinstance(value, int) and value % 2:
        return "even, as positions turn pairs of numbers"
    if "drop" in key and isinstance(value, (int, float)) and not 0 <= value <= 1:
        return "from 0 to 1"
    if key in _ACTIVATIONS and value is not None:
        from transformers.activations import ACT2FN

        return "" if value in [*ACT2FN] else "a function that transformers has, such as gelu, relu or silu"
    return ""


def _check_heads(source: HuggingFaceConfig, settings: Any, *, given: bool) -> None:
    """Raise InvalidSettingError if the heads cannot share the model's width, or keys and values. `given`: the width of
    a head is given, and need not divide the model's."""
    width, heads = (settings.attribute_map.get(key, key) for key in ("hidden_size", "num_attention_heads"))
    pairs = [] if given or hasattr(settings, "d_kv") else [(width, heads)]
    if getattr(settings, "num_key_value_heads", None) is not None:
        pairs.append((heads, "num_key_value_heads"))
    for whole, parts in pairs:
        dividend, divisor = getattr(settings, whole), getattr(settings, parts)
        if dividend % divisor:
            raise _config_error(source, f"{whole}={dividend} must be a multiple of {parts}={divisor}")


def _settings(source: HuggingFaceConfig, families: "tuple[str, ...] | list[str]", data: str) -> Any:
    settings = read_config(source)
    if settings.model_type not in families:
        why = f"transformers' family {settings.model_type} has no chain of layers for {data}"
        raise InvalidSettingError("model.name", source.name, f"{why}; use one of {', '.join(families)}")
    return settings


def _check_text_fits(source: HuggingFaceConfig, settings: Any, vocabulary: int, length: int) -> None:
    if vocabulary > settings.vocab_size:
        why = f"{source.name} knows {settings.vocab_size} tokens; use {settings.vocab_size} or fewer"
        raise InvalidSettingError("dataset.vocabulary", vocabulary, why)
    positions = getattr(settings, "max_position_embeddings", length)
    if length > positions:
        why = f"{source.name} has {positions} positions; use as many or fewer"
        raise InvalidSettingError("model.length", length, why)


def _mask(settings: Any, index: int) -> Mask:
    """The attention mask of block `index` of a causal language model."""
    match settings.model_type:
        case "mistral" | "phi3":
            slides = settings.sliding_window is not None
        case "qwen2" | "qwen3" | "smollm3":
            slides = settings.layer_types[index] == "sliding_attention"
        case _:
            slides = False
    return "sliding" if slides else "causal"


def _build_on_meta(
    source: HuggingFaceConfig, settings: Any, auto: str, classifier: str = ""
) -> tuple[Any, InitialValues]:
    """The model without memory, in training mode, in float32, and how its layers get their values."""
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(
                settings, attn_implementation=source.attention, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # whatever a constructor raises for values that a configuration may have
        why = f"no model can be made of the values ({error_text(error).partition('; ')[0]})"
        raise _config_error(source, why) from error
    weights = Weights(source.name, model, classifier) if source.pretrained else None
    if source.lora is not None:
        _add_adapters(model, source.lora)
        if classifier:  # it may have other classes than the pretrained model
            model.get_submodule(classifier).requires_grad_(True)
    return model.train(), InitialValues(model, weights)


def _add_adapters(model: Any, lora: LoraConfig) -> None:
    """Put peft's adapters into the model; only they are trained."""
    try:
        from peft import LoraConfig as Adapters
        from peft import inject_adapter_in_model
    except ImportError as error:
        why = "needs the package peft; install it by pip install 'gpipe-cli[peft]', or use model.lora=null"
        raise InvalidSettingError("model.lora.rank", lora.rank, why) from error
    names = None if lora.target_modules is None else list(lora.target_modules)
    with warnings.catch_warnings(action="ignore"):  # a warning that GPT-2's linear modules are transposed
        try:
            adapters = Adapters(r=lora.rank, lora_alpha=lora.alpha, target_modules=names)
            inject_adapter_in_model(adapters, model)
        except ValueError as error:
            linear_names = {
                path.rpartition(".")[2]
                for path, module in model.named_modules()
                if type(module).__name__ in ADAPTABLE_CLASSES
            }
            why = f"{error_text(error).rstrip('.')}; use some of {', '.join(sorted(linear_names))}"
            raise InvalidSettingError("model.lora.target_modules", names, why) from error
    for module in adapters_in(model):
        module.kwargs = {}  # only the module's path, in which equal blocks would differ; nothing reads it


def _share_tables(model: Any) -> dict[str, str]:
    """Give every block the table of relative positions of the first block of its stack; returns the names of the new
    parameters -> the names of their owners."""
    tied = {}
    for stack in ("encoder", "decoder"):
        (first, owner), *others = (
            (f"{stack}.block.{index}.layer.0.SelfAttention", block.layer[0].SelfAttention)
            for index, block in enumerate(model.get_submodule(stack).block)
        )
        for path, attention in others:
            with torch.device("meta"):
                table = nn.Embedding(*owner.relative_attention_bias.weight.shape)
            table.weight = owner.relative_attention_bias.weight
            attention.relative_attention_bias, attention.has_relative_attention_bias = table, True
            tied[f"{path}.relative_attention_bias.weight"] = f"{first}.relative_attention_bias.weight"
    return tied


def _as_sequential(source: HuggingFaceConfig, model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Sequential:
    """The layers as a sequence. Raises InvalidSettingError if the model has a parameter or buffer that no layer has."""
    sequence = nn.Sequential()
    for layer, module in layers.items():
        sequence.add_module(layer, module)
    parameters = {id(parameter) for parameter in sequence.parameters()}
    buffers = {name.partition(".")[2] for name, _ in sequence.named_buffers()}
    forgotten = [name for name, parameter in model.named_parameters() if id(parameter) not in parameters]
    forgotten += [name for name, _ in model.named_buffers() if name not in buffers]
    if forgotten:
        why = f"has tensors that the chain of its family lacks, such as {forgotten[0]}"
        raise InvalidSettingError("model.name", source.name, f"{why}; use another model of the family")
    return sequence
