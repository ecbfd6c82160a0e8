"""Models of Hugging Face's transformers: a chain computes what transformers' own model computes, bit for bit, from its
initial values and its files of weights, in any cut; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from training_runs import assert_same_tensors, configure, final_tensors, train_here

from gpipe_cli.errors import InputError
from gpipe_cli.models.hugging_face import language_model
from gpipe_cli.pipeline.profile.layer_signature import signature
from gpipe_cli.pipeline.runtime.initial_weights import materialize

TOKENS = 300
WORDS = {"vocab_size": TOKENS, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LIKE_LLAMA = WORDS | SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.1}
SLIDES_IN_LAST = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
LANGUAGE_MODELS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **WORDS),
    "llama": transformers.LlamaConfig(**LIKE_LLAMA),
    "mistral": transformers.MistralConfig(sliding_window=6, **LIKE_LLAMA),
    "qwen2": transformers.Qwen2Config(**SLIDES_IN_LAST, **LIKE_LLAMA),
    "qwen3": transformers.Qwen3Config(head_dim=8, **SLIDES_IN_LAST, **LIKE_LLAMA),
}
CPU = torch.device("cpu")


def saved(folder: Path, family: str, shards: str = "5GB", **changes: Any) -> Path:
    """A folder as transformers writes it: config.json and weights, every value at random."""
    config = type(LANGUAGE_MODELS[family])(**LANGUAGE_MODELS[family].to_dict() | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            # of norms and biases, too: ones and zeros would hide a mistake
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 5)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def on_meta(folder: Path, **settings: Any) -> nn.Sequential:
    with torch.device("meta"):
        return language_model(str(folder), **{"vocabulary": TOKENS, "length": 64, "pretrained": True} | settings)


def chain_of(folder: Path, first: int = 0, **settings: Any) -> nn.Sequential:
    """The layers from number `first` on, each with its own values."""
    model = on_meta(folder, **settings)
    return materialize(model, first, len(model) - first, run_seed=3, device=CPU)


def whole(folder: Path, attention: str = "eager") -> Any:
    """transformers' own model. A cache of keys and values, for later tokens, would lay them out differently."""
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32, use_cache=False)


def names_of_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names in the whole model, without those of layers."""
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def sentences(samples: int, length: int) -> Tensor:
    return torch.randint(TOKENS, (samples, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_same_bits_as_transformers(family: str, attention: str, tmp_path: Path) -> None:
    """From weights in several files: logits, then gradients with dropout; and the loss, up to the order of a sum."""
    folder = saved(tmp_path, family, shards="20KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    layers, model = chain_of(folder, attention=attention), whole(folder, attention)
    own = names_of_model(dict((*layers.named_parameters(), *layers.named_buffers())))
    assert_same_tensors(own, dict((*model.named_parameters(), *model.named_buffers())))
    tokens, targets = sentences(3, 18)[:, :-1], sentences(3, 18)[:, 1:].contiguous()
    layers.eval(), model.eval()
    assert torch.equal(layers(tokens), model(tokens).logits)
    layers.train(), model.train()
    logits = []
    for each in (layers, model):
        torch.manual_seed(5)
        result = each(tokens)
        logits.append(result if each is layers else result.logits)
        nn.functional.cross_entropy(logits[-1].flatten(0, 1), targets.flatten()).backward()
    assert torch.equal(*logits)
    gradients = [{name: one.grad for name, one in each.named_parameters()} for each in (layers, model)]
    assert_same_tensors(names_of_model(gradients[0]), gradients[1])
    torch.manual_seed(5)
    loss = model(tokens, labels=tokens, shift_labels=targets).loss
    torch.testing.assert_close(nn.functional.cross_entropy(logits[0].flatten(0, 1), targets.flatten()), loss)


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_initial_values_are_those_of_transformers_and_the_same_for_every_cut(family: str, tmp_path: Path) -> None:
    """Every value is set, rotary tables as well, and norms and spreads are as transformers sets them."""
    folder = saved(tmp_path, family)
    layers = chain_of(folder, pretrained=False)
    model = transformers.AutoModelForCausalLM.from_config(whole(folder).config).requires_grad_(False)
    drawn = names_of_model(dict((*layers.requires_grad_(False).named_parameters(), *layers.named_buffers())))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if len(tensor.unique()) < 3 or "rotary" in name:
            assert torch.equal(drawn[name], tensor), name
        else:
            assert float(drawn[name].std()) == pytest.approx(float(tensor.std()), rel=0.3), name
            assert abs(drawn[name].mean()) < 0.01, name
    torch.rand(17)  # what was drawn before does not matter
    later = chain_of(folder, first=2, pretrained=False).state_dict()
    assert_same_tensors(later, {name: layers.state_dict()[name] for name in later})


def test_a_file_of_the_base_model_and_one_in_bfloat16(tmp_path: Path) -> None:
    """GPT-2's files on the hub lack the prefix of the base model; those of large models are in bfloat16."""
    folder = saved(tmp_path / "head", "gpt2", tie_word_embeddings=True)
    model = whole(folder)
    model.transformer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text((folder / "config.json").read_text())
    tokens = sentences(2, 9)
    assert torch.equal(chain_of(tmp_path / "base").eval()(tokens), model.eval()(tokens).logits)
    half = saved(tmp_path / "whole", "llama")
    transformers.AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    found = chain_of(tmp_path / "half")
    assert {tensor.dtype for tensor in found.state_dict().values()} == {torch.float32}
    assert torch.equal(found.eval()(tokens), whole(tmp_path / "half").eval()(tokens).logits)


def test_tied_weights_are_one_parameter_of_two_layers(tmp_path: Path) -> None:
    layers = on_meta(saved(tmp_path, "qwen3", tie_word_embeddings=True))
    assert layers[-1].lm_head.weight is layers[0].model.embed_tokens.weight


def test_equal_blocks_are_traced_once(tmp_path: Path) -> None:
    """Planning a model with hundreds of blocks would take minutes otherwise; a block that slides is another."""
    layers = on_meta(saved(tmp_path, "qwen3"))
    embedding, first, second, slides, head = map(signature, layers)
    assert first == second
    assert len({embedding, first, slides, head}) == 4
    layers[2].requires_grad_(False)
    assert signature(layers[2]) != first


@pytest.mark.parametrize(
    ("family", "changes", "settings", "message"),
    [
        ("llama", {}, {"vocabulary": 301}, "dataset.vocabulary=301: .* knows 300 tokens; use 300"),
        ("gpt2", {}, {"length": 65}, "model.length=65: .* has 64 positions"),
        ("llama", {}, {"config": {"atention_dropout": 0.1}}, "model.config.atention_dropout=0.1: .*attention_dropout"),
        ("llama", {}, {"config": {"hidden_size": "wide"}}, "model.name=.*: no configuration"),
        ("llama", {}, {"config": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}, "rotary.*model.config"),
        ("llama", {}, {"config": {"hidden_size": 16}}, "model.safetensors of .* has .* of shape"),
        ("llama", {}, {"config": {"num_hidden_layers": 4}}, r"has no tensor model.layers.3\..*model.pretrained=false"),
    ],
)
def test_refused(family: str, changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family, **changes)
    with pytest.raises(InputError, match=message) as caught:
        chain_of(folder, **settings)
    assert len(str(caught.value).splitlines()) == 1


def test_refused_folders(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama", shards="20KB")
    shard = max(folder.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(InputError, match=f"has no file {shard.name}; .*model.pretrained=false"):
        chain_of(folder)
    shard.write_text("cut off")
    with pytest.raises(InputError, match=f"{shard.name}: cannot be read as safetensors"):
        chain_of(folder)
    with pytest.raises(InputError, match=r"model.name=.*config.json"):
        chain_of(tmp_path / "nothing")
    (folder / "config.json").write_text(json.dumps({"model_type": "opt"}))
    with pytest.raises(InputError, match="family opt has no chain of layers for text; use one of gpt2, llama"):
        chain_of(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_a_training_has_the_same_bits_for_every_cut(tied: bool, tmp_path: Path) -> None:
    """With dropout, recomputation and loaded weights; then its checkpoint goes on without the files of weights."""
    folder = saved(tmp_path / "model", "qwen3", tie_word_embeddings=tied)
    settings = (
        "model=hf", f"model.name={folder}", "model.pretrained=true", "model.length=12", "dataset=synthetic_text",
        f"dataset.vocabulary={TOKENS}", "dataset.train_samples=10", "dataset.test_samples=3", "batch_size=5",
        "micro_batches=2", "threads=1", "device=cpu", "executor=in_process", "logger=[]", "ema_decay=0",
        "recompute=always", "epochs=1",
    )  # fmt: skip
    runs = []
    for cut in ("partitions=1", "partition.balance=[2,3]"):
        partitions = () if cut == "partitions=1" else ("partitions=2",)
        runs.append(tmp_path / f"run{len(runs)}")
        train_here(configure(*settings, *partitions, cut), runs[-1])
    one, other = map(final_tensors, runs)
    assert_same_tensors(one, other)
    assert ("model/head.lm_head.weight" in one) != tied
    trained = one["model/block_000.model.layers.0.mlp.up_proj.weight"]
    loaded = whole(folder).model.layers[0].mlp.up_proj.weight
    assert not torch.equal(trained, loaded)
    torch.testing.assert_close(trained, loaded, atol=0.01, rtol=0)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    train_here(configure(*settings, "epochs=2", f"resume={runs[0]}"), tmp_path / "run2")
