"""`gpipe export`: a run's model as a single plain file, which other programs read without this package; a model
of transformers also as the folder that transformers itself writes (`hugging_face_folder.py`).

If timm builds the network, tensors have timm's names, without the names of our layers before them; otherwise the names
in `nn.Sequential.state_dict`. The metadata has what else is needed to use them: model settings, tied weights, classes,
normalization of pixels, and for text the vocabulary or the tokenizer.

The file is evaluated as another program would do it: read from disk into timm's network, transformers' model, plain
PyTorch or onnxruntime, without stages, in the micro-batches of the pipeline, so that the results are bit-identical if
nothing was lost.
"""

import base64
import io
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from gpipe_cli.assembly.build import MEMORY_FORMATS, outputs_of, timm_name
from gpipe_cli.assembly.loss import NO_TOTALS
from gpipe_cli.config.groups import HuggingFaceConfig, ImagesConfig, ResNetConfig, TimmConfig, group_choice
from gpipe_cli.config.settings import ExportSettings, Format, TrainConfig
from gpipe_cli.data.images import centre_crop_ratio, find_images
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.control_group import BlockedOn
from gpipe_cli.errors import InputError
from gpipe_cli.models.preprocessing import PREPROCESSOR
from gpipe_cli.models.timm_models import timm_arguments
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_tuple, as_value, in_layout, split_all
from gpipe_cli.pipeline.runtime.tied_weights import canonical_names, find_ties
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.system.accelerator import to_device
from gpipe_cli.system.files import write_atomic
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint.files import read_index, safetensors_parts
from gpipe_cli.training.checkpoint.whole_model import new_model, whole_model
from gpipe_cli.training.data_feed import Data, MiniBatch, saved_tokenizer, saved_vocabulary
from gpipe_cli.training.engine import WorkerProcess
from gpipe_cli.training.hugging_face_folder import load_program, model_class_in, preprocessor_config, write_folder
from gpipe_cli.training.onnx_file import onnx_content, onnx_program
from gpipe_cli.training.step import build_loss, normalize_inputs
from gpipe_cli.training.train_loop import to_scores
from gpipe_cli.units import plural


def write_model(
    settings: ExportSettings, config: TrainConfig, checkpoint: Path, file: Path, process: WorkerProcess
) -> None:
    """Write the model of a checkpoint to `file`, and report it; `config`: the run's settings, with `threads`.

    Raises InputError for a model that cannot be exported in this format, and for missing evaluation data.
    """
    control, _ = process.connect()
    with control.blocked_on(BlockedOn.COMPILER):  # minutes, for a large model
        model = whole_model(config, checkpoint)
        facts = _file_metadata(config, Path(settings.run), checkpoint, model)
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
        by_timm = _timm_arguments(config) is not None
        # a layer made of timm's modules holds them under their names in timm's whole network
        tensors = {name.partition(".")[2] if by_timm else name: tensor for name, tensor in model.state_dict().items()}
        contents = plural(len(tensors), "tensor")
        match settings.format:
            case "safetensors":  # which refuses a tensor under two names
                once = {name: tensor for name, tensor in tensors.items() if name not in facts.get("tied", {})}
                write_atomic(file, safetensors_parts(_make_contiguous(once), {"format": "pt", **texts}))
            case "torch":
                content = io.BytesIO()
                torch.save({"state_dict": _make_contiguous(tensors), "metadata": facts}, content)
                write_atomic(file, [content.getbuffer()])
            case "onnx":
                assert config.threads is not None
                serialized, any_batch = onnx_content(config, model, texts, config.threads)
                write_atomic(file, serialized)
                contents = "for batches of any size" if any_batch else "for one sample at a time"
            case "hf":
                more, dataset = saved_tokenizer(Path(settings.run)), config.dataset
                if isinstance(dataset, ImagesConfig):
                    more[PREPROCESSOR] = preprocessor_config(dataset)
                classes = facts.get("classes", [])
                contents = plural(write_folder(config.model.name, model, file, more, classes), "tensor")
    content_bytes = sum(path.stat().st_size for path in ([file] if file.is_file() else file.rglob("*")))
    process.report(events.ModelWritten(content_bytes, contents, _load_expression(config, settings.format, file)))


def _make_contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _file_metadata(config: TrainConfig, run: Path, checkpoint: Path, model: nn.Sequential) -> dict[str, Any]:
    """The file's metadata: strings, numbers, lists and dictionaries; the names of classes only if they are known."""
    settings = {key: value for key, value in asdict(config.model).items() if key not in ("pretrained", "weights")}
    arguments = _timm_arguments(config)
    dataset = config.dataset
    index = read_index(checkpoint)
    facts: dict[str, Any] = {
        "model": group_choice(config.model) if arguments is None else arguments["model_name"],
        "settings": settings,
        "outputs": outputs_of(config),
        "dataset": dataset.name,
        "step": index.progress.step,
        "averaged": bool(config.ema_decay and index.progress.ema_updates),
    }
    if tied := canonical_names(find_ties(model)):  # a name -> the name of the same tensor in the file
        facts["tied"] = tied
    if not isinstance(dataset, ImagesConfig):
        return facts | _tokenizer_metadata(run)
    facts |= {"image_size": dataset.image_size, "centre_crop": centre_crop_ratio(dataset)}
    facts |= {"mean": list(dataset.mean), "std": list(dataset.std), "interpolation": dataset.interpolation}
    if (classes := index.classes) is None:  # a run of an older version: the data's present classes, if it is there
        with suppress(InputError):
            classes = find_images(replace(dataset, download=False), config.seed)[0].class_names
    return facts | ({"classes": list(classes)} if classes else {})


def _tokenizer_metadata(run: Path) -> dict[str, Any]:
    """`sentencepiece`: the vocabulary that the run learned; or `tokenizer`: the files of its tokenizer by name. Files
    are in base64."""
    if (saved_model := saved_vocabulary(run)) is not None:
        return {"sentencepiece": base64.b64encode(saved_model).decode()}
    files = {name: base64.b64encode(content).decode() for name, content in saved_tokenizer(run).items()}
    return {"tokenizer": files} if files else {}


def _timm_arguments(config: TrainConfig) -> dict[str, Any] | None:
    """The arguments with which `timm.create_model` builds the run's network; None if timm does not build it."""
    model, dataset = config.model, config.dataset
    if not isinstance(model, ResNetConfig | TimmConfig) or not isinstance(dataset, ImagesConfig):
        return None
    name, classes = timm_name(model), dataset.model_classes
    return {"model_name": name, **timm_arguments(name, num_classes=classes, image_size=dataset.image_size)}


def _load_expression(config: TrainConfig, file_format: Format, file: Path) -> str:
    """The Python expression that reads the file in its format."""
    arguments = _timm_arguments(config)
    match file_format:
        case "onnx":
            return f"onnxruntime.InferenceSession({str(file)!r})"
        case "hf":
            return f"transformers.{model_class_in(file).__name__}.from_pretrained({str(file)!r})"
        case _ if arguments is not None:
            name, *others = [repr(arguments.pop("model_name")), *(f"{key}={value}" for key, value in arguments.items())]
            return f"timm.create_model({', '.join([name, *others, f'checkpoint_path={str(file)!r}'])})"
        case "torch":
            return f'torch.load({str(file)!r}, weights_only=True)["state_dict"]'
    return f"safetensors.torch.load_file({str(file)!r})"


def evaluate_file(
    config: TrainConfig, form: Format, file: Path, checkpoint: Path, spec: PipelineSpec, process: WorkerProcess
) -> None:
    """Run the test set once through the model that another program reads from an exported file; report the scores.

    `config` has the settings of the run that wrote `checkpoint`, of which `file` was made; `spec` has a single process.
    """
    data = Data(config, spec, process.rank, None, checkpoint)
    control, _ = process.connect()
    test = data.reader(control, "test")
    device = torch.device("cpu" if form == "onnx" else spec.layout.devices[0])
    program, logits_of = _load_program(config, form, file, spec, device)
    total = NO_TOTALS
    for position in range(test.batches.steps_per_epoch):
        sizes = micro_batch_sizes(test.batches.size(0, position), config.micro_batches)
        mini_batch = MiniBatch(test, 0, position)
        objective = build_loss(config, mini_batch.targets(), sizes, 0.0, device)
        with control.blocked_on(BlockedOn.DATA):
            inputs = mini_batch.inputs()
        assert objective is not None, "a single process has the targets"
        assert inputs is not None, "and the inputs"
        for micro_batch, pieces in enumerate(split_all(normalize_inputs(config, inputs), sizes)):
            outputs = logits_of(tuple(to_device(piece, device) for piece in pieces))
            objective.observe(micro_batch, outputs, objective.loss(micro_batch, outputs))
        total += objective.totals()
    test.close()
    process.report(events.FileEvaluated(to_scores(config, total, averaged=config.ema_decay > 0), program))


def _load_program(
    config: TrainConfig, form: Format, file: Path, spec: PipelineSpec, device: torch.device
) -> tuple[str, Callable[[Tensors], Tensors]]:
    """The name and version of the program that reads the file, and a function from inputs on `device` to logits."""
    if form == "onnx":
        return onnx_program(file, spec.layout.threads)
    if form == "hf":
        assert isinstance(config.model, HuggingFaceConfig)
        return load_program(file, config.model.attention, device)
    arguments = _timm_arguments(config)
    if arguments is None:
        tensors = load_file(file) if form == "safetensors" else torch.load(file, weights_only=True)["state_dict"]
        layers = new_model(config)
        tied = canonical_names(find_ties(layers)).items()
        layers.load_state_dict({**tensors, **{name: tensors[saved] for name, saved in tied}})
        model: nn.Module = layers
        program = f"PyTorch {torch.__version__}"
    else:
        import timm

        model = timm.create_model(**arguments, checkpoint_path=str(file))
        program = f"timm {timm.__version__}"
    memory_format = MEMORY_FORMATS[spec.memory_format]
    model.eval().to(device).to(memory_format=memory_format)

    @torch.no_grad()
    def logits_of(inputs: Tensors) -> Tensors:
        return as_tuple(model(as_value(tuple(in_layout(tensor, memory_format) for tensor in inputs))))

    return program, logits_of
