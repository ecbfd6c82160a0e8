"""Models of Hugging Face's transformers: a chain computes what transformers' own model computes, bit for bit, from its
initial values and its files of weights, in any cut; and what is refused."""

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizer_files import LINES, write_tokenizer
from torch import Tensor, nn
from training_runs import assert_same_tensors, command, configure, final_tensors, of_type, train_here

from gpipe_cli.config.groups import HuggingFaceConfig, LoraConfig
from gpipe_cli.errors import InputError
from gpipe_cli.models.hugging_face import (
    image_classifier,
    language_model,
    masked_language_model,
    translation_model,
)
from gpipe_cli.pipeline.profile.layer_signature import signature
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.pipeline.runtime.tied_weights import find_ties
from gpipe_cli.training.checkpoint.files import find_checkpoint, read_index, select
from gpipe_cli.training.events import Evaluated
from gpipe_cli.training.hugging_face_folder import GENERATION, write_folder

transformers = pytest.importorskip("transformers")

TOKENS, CLASSES, PIXELS = 300, 7, 16
WORDS = {"vocab_size": TOKENS, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT = WORDS | BLOCKS | {"max_position_embeddings": 64}
LIKE_LLAMA = BERT | {"num_key_value_heads": 2, "attention_dropout": 0.1}
UNTIED = {"tie_word_embeddings": False}
SLIDES_IN_LAST = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
SLIDES_IN_FIRST = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", *["full_attention"] * 2],
    "pad_token_id": 0,
}
GPT2 = WORDS | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = WORDS | {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
VIT = BLOCKS | {"image_size": PIXELS, "patch_size": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


@dataclass(frozen=True)
class Kind:
    """What a model is for: transformers' class, our chain, the chain's inputs, and transformers' inputs."""

    auto: Any
    build: Callable[..., nn.Sequential]
    inputs: Callable[[], Any]
    as_arguments: Callable[[Any], dict[str, Any]]


def random_tokens(length: int, samples: int = 3) -> Tensor:
    return torch.randint(1, TOKENS, (samples, length), generator=torch.Generator().manual_seed(length))


def random_pairs() -> tuple[Tensor, Tensor]:
    source = random_tokens(17)
    source[1, 10:] = 0  # padding
    return source, random_tokens(11)


def of_pairs(pairs: tuple[Tensor, Tensor]) -> dict[str, Any]:
    source, target = pairs
    return {
        "input_ids": source,
        "attention_mask": (source != 0).long(),
        "decoder_input_ids": target,
        "use_cache": False,
    }


TEXT = {"vocabulary": TOKENS, "length": 64}
CAUSAL = Kind(
    transformers.AutoModelForCausalLM,
    partial(language_model, **TEXT),
    partial(random_tokens, 17),
    lambda tokens: {"input_ids": tokens},
)
MASKED = Kind(
    transformers.AutoModelForMaskedLM, partial(masked_language_model, **TEXT), CAUSAL.inputs, CAUSAL.as_arguments
)
PAIRS = Kind(transformers.AutoModelForSeq2SeqLM, partial(translation_model, **TEXT, pad=0), random_pairs, of_pairs)
IMAGES = Kind(
    transformers.AutoModelForImageClassification,
    partial(image_classifier, num_classes=CLASSES, image_size=PIXELS),
    lambda: torch.randn(3, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0)),
    lambda images: {"pixel_values": images},
)
MODELS: dict[str, tuple[Kind, Any]] = {
    "gpt2": (CAUSAL, transformers.GPT2Config(**GPT2, **UNTIED)),
    "llama": (CAUSAL, transformers.LlamaConfig(**LIKE_LLAMA)),
    "mistral": (CAUSAL, transformers.MistralConfig(sliding_window=6, **LIKE_LLAMA)),
    "qwen2": (CAUSAL, transformers.Qwen2Config(**SLIDES_IN_LAST, **LIKE_LLAMA)),
    "qwen3": (CAUSAL, transformers.Qwen3Config(head_dim=8, **SLIDES_IN_LAST, **LIKE_LLAMA, **UNTIED)),
    "gemma": (CAUSAL, transformers.GemmaConfig(head_dim=8, **LIKE_LLAMA)),
    "olmo2": (CAUSAL, transformers.Olmo2Config(**LIKE_LLAMA)),
    "phi3": (CAUSAL, transformers.Phi3Config(sliding_window=6, resid_pdrop=0.1, pad_token_id=0, **LIKE_LLAMA)),
    "smollm3": (CAUSAL, transformers.SmolLM3Config(no_rope_layers=[1, 0, 1], **SLIDES_IN_FIRST, **LIKE_LLAMA)),
    "tied gpt2": (CAUSAL, transformers.GPT2Config(**GPT2)),
    "tied llama": (CAUSAL, transformers.LlamaConfig(**LIKE_LLAMA, tie_word_embeddings=True)),
    "bert": (MASKED, transformers.BertConfig(**BERT)),
    "vit": (IMAGES, transformers.ViTConfig(**VIT, num_labels=CLASSES)),
    "t5": (PAIRS, transformers.T5Config(**T5)),
    "t5 v1.1": (PAIRS, transformers.T5Config(**T5, feed_forward_proj="gated-gelu", **UNTIED)),
}


def saved(folder: Path, name: str, shards: str = "5GB", **changes: Any) -> Path:
    """A folder as transformers writes it: config.json and weights, every value at random."""
    kind, config = MODELS[name]
    model = kind.auto.from_config(type(config)(**config.to_dict() | changes))
    if name == "t5 v1.1":  # as its files on the hub
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            # also of norms and biases: ones and zeros would hide a mistake
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 5)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


class RunsWhereRead:
    """A pickle of it makes the file where it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def on_meta(folder: Path, build: Callable[..., nn.Sequential] = CAUSAL.build, **settings: Any) -> nn.Sequential:
    with torch.device("meta"):
        defaults = {"pretrained": True, "config": None, "attention": "eager", "length": 8}
        return build(HuggingFaceConfig(str(folder), **defaults | settings))


def with_values(model: nn.Sequential, first: int = 0) -> nn.Sequential:
    """The layers from number `first` on, each with its own values."""
    return materialize(model, first, len(model) - first, run_seed=3, ties=find_ties(model))


def whole(folder: Path, kind: Kind = CAUSAL, attention: str = "eager") -> Any:
    """transformers' own model. A cache of keys and values, for later tokens, would lay them out differently."""
    model = kind.auto.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    model.config.use_cache = False
    return model


def tensors_of(model: nn.Module, layers: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers; `layers`: by the names in the whole model, without the layers' names."""
    found = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers()))
    return {name.partition(".")[2] if layers else name: tensor for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, ("eager", "sdpa")[at % 2]) for at, name in enumerate(MODELS)), ("gpt2", "sdpa"), ("t5", "sdpa")],
)
def test_same_bits_as_transformers(name: str, attention: str, tmp_path: Path) -> None:
    """From weights in several files: values, outputs, then gradients with dropout."""
    kind = MODELS[name][0]
    folder = saved(tmp_path, name, shards="20KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    layers = with_values(on_meta(folder, kind.build, attention=attention))
    model = whole(folder, kind, attention)
    own, theirs = tensors_of(layers, layers=True), tensors_of(model)
    assert own.keys() >= theirs.keys() - {"shared.weight"}
    assert_same_tensors(own, {key: theirs[key if key in theirs else first_block(key)] for key in own})
    inputs = kind.inputs()
    outputs = []
    for training in (False, True):
        layers.train(training), model.train(training)
        torch.manual_seed(5)
        ours = layers(inputs)
        torch.manual_seed(5)
        outputs = [ours, model(**kind.as_arguments(inputs)).logits]
        assert torch.equal(*outputs)
    targets = torch.randint(outputs[0].shape[-1], outputs[0].shape[:-1])
    for output in outputs:
        nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
    for key, tensor in tensors_of(model).items():
        if tensor.grad is None or key == "shared.weight":
            continue
        others = [one for one in own if one not in theirs and first_block(one) == key]
        if others:  # a table that every block reads: the sum is the same, up to its order
            total = sum(one.grad for one in {id(own[name]): own[name] for name in (key, *others)}.values())
            torch.testing.assert_close(total, tensor.grad, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(own[key].grad, tensor.grad), key


def first_block(name: str) -> str:
    """The owner of a table of relative positions."""
    stack, block, _, *rest = name.split(".")
    return ".".join((stack, block, "0", *rest)) if name.endswith("relative_attention_bias.weight") else name


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_are_as_in_transformers_and_the_same_for_every_cut(name: str, tmp_path: Path) -> None:
    """Every value is set, also of tables that no file has; constants are equal, and the others spread alike."""
    kind, config = MODELS[name]
    config.save_pretrained(tmp_path)
    on_no_device = on_meta(tmp_path, kind.build, pretrained=False)
    layers = with_values(on_no_device).requires_grad_(False)
    drawn = tensors_of(layers, layers=True)
    for key, tensor in tensors_of(kind.auto.from_config(config).requires_grad_(False)).items():
        if tensor.dtype == torch.int64 or len(tensor.unique()) < 3 or "rotary" in key:
            assert torch.equal(drawn[key], tensor), key
        elif key != "shared.weight" and (name != "t5 v1.1" or key != "lm_head.weight"):
            assert float(drawn[key].std()) == pytest.approx(float(tensor.std()), rel=0.35), key
            assert abs(float(drawn[key].mean())) < 4 * float(tensor.std()) / tensor.numel() ** 0.5, key
    torch.rand(17)  # what was drawn before does not matter
    later = with_values(on_meta(tmp_path, kind.build, pretrained=False), first=2).state_dict()
    assert_same_tensors(later, {key: layers.state_dict()[key] for key in later})


def test_files_of_the_base_model_and_in_bfloat16(tmp_path: Path) -> None:
    """GPT-2's files on the hub lack the prefix of the base model; large models' files are in bfloat16."""
    folder = saved(tmp_path / "head", "tied gpt2")
    model = whole(folder)
    model.transformer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text((folder / "config.json").read_text())
    tokens = random_tokens(9)
    assert torch.equal(with_values(on_meta(tmp_path / "base")).eval()(tokens), model.eval()(tokens).logits)
    half = saved(tmp_path / "whole", "llama")
    transformers.AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    found = with_values(on_meta(tmp_path / "half"))
    assert {tensor.dtype for tensor in found.state_dict().values()} == {torch.float32}
    assert torch.equal(found.eval()(tokens), whole(tmp_path / "half").eval()(tokens).logits)


def test_a_layer_reads_only_the_files_of_its_tensors(tmp_path: Path) -> None:
    """As every process does: without the file of the first layer all others can be loaded."""
    folder = saved(tmp_path, "llama", shards="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / index["weight_map"]["model.embed_tokens.weight"]).unlink()
    with_values(on_meta(folder), first=1)
    with pytest.raises(InputError, match=r"has no file model-.*model\.pretrained=false"):
        with_values(on_meta(folder))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"vocabulary": 301}, r"dataset\.vocabulary=301: .* knows 300 tokens; use 300"),
        ("gpt2", {"length": 65}, r"model\.length=65: .* has 64 positions"),
        ("vit", {"image_size": 32}, r"dataset\.image_size=32: .*model\.config={image_size: 32}"),
        ("llama", {"config": {"atention_dropout": 0.1}}, r"model\.config\.atention_dropout=0\.1: .*attention_dropout"),
        ("llama", {"config": {"tie_word_embeddings": True}}, r"lm_head\.weight.* differ .*tie_word_embeddings: false"),
    ],
)
def test_refused(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    kind = MODELS[name][0]
    config = {"config": settings.pop("config")} if "config" in settings else {}
    with pytest.raises(InputError, match=message) as caught:
        with_values(on_meta(saved(tmp_path, name), partial(kind.build, **settings), **config))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_attention_heads": 0}, "num_attention_heads=0 must be 1 or more"),
        ("gpt2", {"n_layer": -1}, "n_layer=-1 must be 1 or more"),  # once a model without layers
        ("gpt2", {"n_head": 3}, "n_embd=32 must be a multiple of n_head=3"),
        ("vit", {"num_attention_heads": 3}, "hidden_size=32 must be a multiple of num_attention_heads=3"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ("t5", {"dropout_rate": 3}, "dropout_rate=3 must be from 0 to 1"),
        ("bert", {"hidden_act": "gelo"}, "hidden_act=gelo must be"),
        ("llama", {"hidden_size": "wide"}, "hidden_size.*wide"),
        ("bert", {"add_cross_attention": True}, "no model can be made of the values"),
        ("llama", {"model_type": "of_mine", "auto_map": {"AutoConfig": "mine.Config"}}, "custom code"),
    ],
)
def test_a_configuration_is_refused_by_its_key(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """These were tracebacks, or lines that named an exception; code in the folder is never run."""
    kind, config = MODELS[name]
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(InputError, match=rf"^model\.name=.*{message}.*; .*config\.json[^\n]*$") as caught:
        on_meta(tmp_path, kind.build, pretrained=False)
    assert not re.search(r"Error\b", str(caught.value))
    assert not (tmp_path / "ran").exists()


SHORT = ["model=hf", "model.pretrained=true", "epochs=1", "micro_batches=2", "threads=1", "device=cpu", "logger=[]"]
SYNTHETIC = [
    "model.length=12", "dataset=synthetic_text", f"dataset.vocabulary={TOKENS}", "dataset.train_samples=10",
    "dataset.test_samples=3", "batch_size=5",
]  # fmt: skip


def test_a_translation_in_processes_of_their_own(tmp_path: Path) -> None:
    """Tables of positions and embeddings are shared by three stages; sentences are padded, decoded and scored."""
    folder = saved(tmp_path / "model", "t5")
    words = ["ab", "ba", "aab", "b a", "abba a", "a"]
    for name in ("train", "test"):
        lines = [f"{one}\t{other}\tde-en" for one in words for other in words]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = [
        *SHORT, f"model.name={folder}", "model.length=16", "dataset=parallel_text", f"dataset.root={tmp_path}",
        f"dataset.cache={tmp_path / 'cache'}", "dataset.vocabulary=270", "batch_size=12",
    ]  # fmt: skip
    train_here(configure(*settings, "partitions=1", "executor=in_process"), tmp_path / "one")
    assert command("train", *settings, "partitions=3", f"run_folder={tmp_path / 'three'}") == 0
    assert_same_tensors(final_tensors(tmp_path / "one"), final_tensors(tmp_path / "three"))


def test_images(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In two memory formats: images are channels last, what blocks exchange is not."""
    folder = saved(tmp_path / "model", "vit")
    settings = [
        *SHORT, f"model.name={folder}", "dataset=synthetic_images", f"dataset.image_size={PIXELS}",
        "dataset.num_classes=4", "dataset.train_samples=10", "dataset.test_samples=3", "batch_size=5",
        "executor=in_process", "memory_format=channels_last",
    ]  # fmt: skip
    for partitions in (1, 3):
        train_here(configure(*settings, f"partitions={partitions}"), tmp_path / str(partitions))
    assert_same_tensors(final_tensors(tmp_path / "1"), final_tensors(tmp_path / "3"))
    assert command("export", f"run={tmp_path / '3'}", "format=hf") == 0
    assert "the same loss, bit for bit" in capfd.readouterr().out


def test_a_pretrained_classifier_means_its_own_classes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its outputs were taken for the classes of the data in their order."""
    names = dict(enumerate("2031"))
    folder = saved(tmp_path / "model", "vit", id2label=names, label2id={name: number for number, name in names.items()})
    settings = [
        *SHORT, f"model.name={folder}", "model.pretrained=true", "dataset=digits", f"dataset.image_size={PIXELS}",
        "batch_size=5", "executor=in_process", "max_steps=1", "check_layers=false",
    ]  # fmt: skip
    assert command("train", *settings, "dataset.classes=[0,1,2,3]", f"run_folder={tmp_path / 'same'}") == 0
    assert "classes   " not in capfd.readouterr().out
    (last,) = (tmp_path / "same").glob("checkpoints/step_*")
    assert read_index(last).classes == tuple("2031")
    assert command("export", f"run={tmp_path / 'same'}", "format=hf", "evaluate=false") == 0
    assert whole(tmp_path / "same" / "hf", IMAGES).config.id2label == names
    assert command("train", *settings, "dataset.classes=[4,5,6,7]", f"run_folder={tmp_path / 'others'}") == 0
    assert "classes      the pretrained classifier is of others: 2, 0, 3, …" in capfd.readouterr().out


# --- gpipe export format=hf


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    """The same tensors, by the names in the model's files, and settings of generation as they were."""
    kind = MODELS[name][0]
    folder = saved(tmp_path / "one", name)
    if (generation := folder / GENERATION).exists():
        generation.write_text(json.dumps(json.loads(generation.read_text()) | {"top_k": 7}))
    write_folder(str(folder), with_values(on_meta(folder, kind.build)), tmp_path / "two", {}, [])
    assert_same_tensors(*(load_file(tmp_path / one / "model.safetensors") for one in ("one", "two")))
    assert_same_tensors(*(tensors_of(whole(tmp_path / one, kind)) for one in ("one", "two")))
    for file in ("config.json", GENERATION):
        one, other = (tmp_path / one / file for one in ("one", "two"))
        assert one.exists() == other.exists()
        assert not one.exists() or json.loads(one.read_text()) == json.loads(other.read_text())


def test_a_run_becomes_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With its tokenizer, evaluated there; a folder that is there is kept, and by overwrite=true written into."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", eos_token="<end>")
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    settings = [
        *SHORT, f"model.name={saved(tmp_path / 'model', 'tied gpt2')}", "model.length=16", "dataset=text_files",
        f"dataset.root={tmp_path / 'text.txt'}", f"dataset.cache={tmp_path / 'cache'}",
        f"dataset.tokenizer={tokenizer}", f"dataset.vocabulary={TOKENS}", "batch_size=8",
        "partitions=2", "executor=in_process", "max_steps=2",
    ]  # fmt: skip
    run = tmp_path / "run"
    train_here(configure(*settings), run)
    assert command("export", f"run={run}", "format=hf") == 0
    printed = capfd.readouterr().out
    assert f"transformers.GPT2LMHeadModel.from_pretrained('{run / 'hf'}')" in printed
    assert "the same loss, bit for bit" in printed
    loaded = whole(run / "hf").state_dict()
    assert torch.equal(loaded["lm_head.weight"], final_tensors(run)["ema/embedding.transformer.wte.weight"])
    text = LINES[3]
    own, theirs = (transformers.AutoTokenizer.from_pretrained(place) for place in (run / "hf", tokenizer))
    assert own.encode(text) == theirs.encode(text)
    (run / "hf" / "README.md").write_text("mine")
    assert command("export", f"run={run}", "format=hf") == 2
    assert "it is there already" in capfd.readouterr().err
    assert command("export", f"run={run}", "format=hf", "overwrite=true", "evaluate=false") == 0
    assert (run / "hf" / "README.md").read_text() == "mine"


def test_code_that_a_folder_names_is_not_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a known family, with custom classes, kernels, quantization and adapters; the run keeps the tokenizer."""
    folder, ran = saved(tmp_path / "model", "llama"), tmp_path / "ran"
    write_tokenizer(folder, eos_token="<end>")
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    planted: dict[str, dict[str, Any]] = {
        "config.json": {
            "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
            "attn_implementation": "mine/kernel", "quantization_config": {"quant_method": "mine"},
        },
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["mine.Model", "mine.Model"]}},
        "generation_config.json": {"custom_generate": "mine"},
        "adapter_config.json": {"peft_type": "LORA", "auto_mapping": {"parent_library": "mine"}},
    }  # fmt: skip
    for name, keys in planted.items():
        written = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(written | keys))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(RunsWhereRead(ran)))
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("\n".join(LINES), encoding="utf-8")
    settings = [
        *SHORT, f"model.name={folder}", "model.length=16", "dataset=text_files", f"dataset.root={text}",
        f"dataset.cache={tmp_path / 'cache'}", f"dataset.vocabulary={TOKENS}", f"dataset.tokenizer={folder}",
        "batch_size=16", "max_steps=1", "partitions=1",
    ]  # fmt: skip
    assert command("train", *settings, f"run_folder={run}") == 0, capfd.readouterr().err
    assert command("evaluate", f"run={run}") == 0
    assert command("export", f"run={run}", "format=hf") == 0
    assert not ran.exists()


# --- masked language models


def test_masked_text_has_the_same_bits_for_every_cut_and_after_a_resumption(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The masks of both epochs are drawn again where the second process, or the resumed run, needs them."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", eos_token="<end>", mask_token="<mask>")
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    settings = [
        *SHORT, f"model.name={saved(tmp_path / 'model', 'bert')}", "model.length=16", "dataset=text_files",
        f"dataset.root={tmp_path / 'text.txt'}", f"dataset.cache={tmp_path / 'cache'}", f"dataset.vocabulary={TOKENS}",
        "batch_size=16", "epochs=2", "checkpoint.every_steps=1",
    ]  # fmt: skip
    own = [*settings, f"dataset.tokenizer={tokenizer}"]
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    train_here(configure(*own, "executor=in_process", "partitions=1"), one)
    assert command("train", *own, "partitions=2", "executor=distributed", "max_steps=6", f"run_folder={two}") == 0
    assert "masked" in capfd.readouterr().out
    steps = read_index(find_checkpoint(one, "last", "run")).progress.steps_per_epoch
    assert steps < 6 < 2 * steps, "the second epoch has begun and is not over"
    assert command("train", f"resume={two}", "partitions=3", f"run_folder={three}", "max_steps=null") == 0
    assert_same_tensors(final_tensors(one), final_tensors(three))
    assert command("export", f"run={one}", "format=hf") == 0
    assert "the same loss, bit for bit" in capfd.readouterr().out
    other = f"dataset.tokenizer={write_tokenizer(tmp_path / 'other', eos_token='<end>')}"
    assert command("train", *settings, other, "partitions=1", f"run_folder={tmp_path / 'no'}") == 2
    assert re.search(r"dataset\.tokenizer=.*mask_token in its tokenizer_config\.json\n$", capfd.readouterr().err)


def test_every_evaluation_hides_the_same_tokens_of_the_test_set(tmp_path: Path) -> None:
    """From the second evaluation on, the inputs had the masks of another epoch than the targets: a model was asked for
    tokens that it was shown."""
    still = ["optimizer=sgd", "learning_rate=constant", "learning_rate.peak=1e-30", "learning_rate.warmup_epochs=0"]
    settings = [*SHORT, *SYNTHETIC, f"model.name={saved(tmp_path / 'model', 'bert')}", "partitions=1", "ema_decay=0"]
    messages = train_here(configure(*settings, *still, "epochs=2", "check_layers=false"), tmp_path / "run")
    first, second = (message.scores.loss for message in of_type(messages, Evaluated))
    assert first == second


# --- adapters


@pytest.mark.parametrize("name", ["llama", "tied gpt2", "t5", "vit"])
def test_adapters_change_nothing_at_first_and_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """Weights are loaded as ever; the adapters are drawn for each layer, and merged where the model is written."""
    peft = pytest.importorskip("peft")
    kind = MODELS[name][0]
    folder = saved(tmp_path / "model", name)
    targets = {"llama": ("q_proj", "down_proj"), "vit": ("q_proj",)}.get(name)
    lora = LoraConfig(rank=3, alpha=6, target_modules=targets)
    layers = with_values(on_meta(folder, kind.build, lora=lora)).eval()
    inputs, model = kind.inputs(), whole(folder, kind).eval()
    with torch.no_grad():
        assert torch.equal(layers(inputs), model(**kind.as_arguments(inputs)).logits)
    assert len({*map(signature, on_meta(folder, kind.build, lora=lora))}) == (7 if name == "t5" else 3)
    trained = {name for name, parameter in layers.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or "classifier" in name for name in trained)
    drawn = layers.state_dict()
    later = with_values(on_meta(folder, kind.build, lora=lora), first=2).state_dict()
    assert_same_tensors(later, {key: drawn[key] for key in later})
    with torch.no_grad():
        for key, parameter in layers.named_parameters():
            if ".lora_B." in key:
                parameter.normal_(generator=torch.Generator().manual_seed(len(key)), std=0.1)
        gpt2 = name == "tied gpt2"  # whose linear modules are transposed
        adapters = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets and [*targets], fan_in_fan_out=gpt2)
        peft.inject_adapter_in_model(adapters, model)
        own = {key: tensor for key, tensor in tensors_of(layers, layers=True).items() if ".lora_" in key}
        assert not model.load_state_dict(own, strict=False).unexpected_keys
        logits = layers(inputs)
        assert torch.equal(logits, model.eval()(**kind.as_arguments(inputs)).logits)
        write_folder(str(folder), layers, tmp_path / "merged", {}, [])
        merged = whole(tmp_path / "merged", kind).eval()(**kind.as_arguments(inputs)).logits
    torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-5)
    assert not torch.equal(merged, whole(folder, kind).eval()(**kind.as_arguments(inputs)).logits)


def test_only_adapters_are_trained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In every cut alike; only they have gradients and optimizer state, also in the plan. A checkpoint has all tensors:
    it is resumed without the files of weights."""
    pytest.importorskip("peft")
    settings = [
        *SHORT, *SYNTHETIC, f"model.name={saved(tmp_path / 'model', 'tied gpt2')}", "executor=in_process",
        "ema_decay=0",
    ]  # fmt: skip
    adapted = [*settings, "model.lora={rank: 2, alpha: 4}"]
    for partitions in (1, 3):
        train_here(configure(*adapted, f"partitions={partitions}", "recompute=always"), tmp_path / str(partitions))
    one = final_tensors(tmp_path / "1")
    assert_same_tensors(one, final_tensors(tmp_path / "3"))
    assert {".lora_" in name for name in one if name.startswith("optimizer/")} == {True}
    own = select(one, "model")
    adapters = {name: tensor for name, tensor in own.items() if ".lora_" in name}
    assert all(bool(tensor.any()) for tensor in adapters.values())
    began = with_values(on_meta(tmp_path / "model")).state_dict()
    weights = {name.replace(".base_layer.", "."): own[name] for name in own.keys() - adapters.keys()}
    assert_same_tensors(weights, {name: began[name] for name in weights})
    assert command("plan", *adapted, "partitions=3", f"output={tmp_path / 'plans'}") == 0
    (plan,) = (tmp_path / "plans").glob("*/plan.json")
    planned = sum(stage["memory"]["gradients_bytes"] for stage in json.loads(plan.read_text())["stages"])
    assert planned == sum(tensor.nbytes for tensor in adapters.values())
    assert command("export", f"run={tmp_path / '3'}", "format=hf") == 0
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    train_here(configure(*adapted, "epochs=2", f"resume={tmp_path / '1'}"), tmp_path / "resumed")
    capfd.readouterr()
    assert command("train", *settings, "model.lora={rank: 2, target_modules: [q]}") == 2
    assert re.search(r"model\.lora\.target_modules=.* use ", capfd.readouterr().err)
