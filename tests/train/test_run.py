"""Whole runs: what they leave, that they learn, and that the receipt says what the schedule does."""

import gc
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from lowtide.errors import ConfigError, LowtideError
from lowtide.testing import cpu_offload
from lowtide.train.loop import StepDone
from lowtide.train.report import setting_name, settings_table

Train = Callable[..., dict[str, Any] | None]


def stock_pipeline(folder: Path) -> Any:
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(str(folder), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture_of(pipe: Any) -> torch.Tensor:
    options: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2, "max_sequence_length": 64}
    return pipe("a cat", generator=torch.Generator().manual_seed(0), output_type="latent", **options).images


def test_a_run_learns_and_its_receipt_is_the_schedule(train: Train, output: Path) -> None:
    report = train(max_train_steps=30, lora_rank=8, validation_disable=False, validation_num_inference_steps=2)
    assert report is not None
    assert report["fixed_batch_loss"]["improvement"] >= 0.10
    expected = [f"transformer_blocks.{index}" for index in (0, 1)]
    expected += [f"single_transformer_blocks.{index}" for index in (0, 1, 4, 5)]
    assert report["recomputed_blocks"] == {"expected": expected, "receipt": expected, "as_expected": True}
    assert report["receipt"]["totals"]["recompute_calls"] == 6
    assert report["receipt"]["fallbacks"] == report["receipt"]["ignored"] == report["receipt"]["inert"] == []
    assert json.loads((output / "report.json").read_text()) == report
    with Image.open(output / "sample-before-after.png") as pair, Image.open(output / "sample-before.png") as before:
        assert pair.width == 2 * before.width + 16
    assert (output / "sample-before.png").read_bytes() != (output / "sample-after.png").read_bytes()


def test_a_learning_rate_of_zero_learns_nothing(train: Train) -> None:
    report = train(learning_rate=0)
    assert report is not None
    assert report["fixed_batch_loss"]["improvement"] == 0


def test_weights_that_broke_in_the_last_step_are_not_written_as_a_result(train: Train, output: Path) -> None:
    with pytest.raises(LowtideError, match="the loss is (nan|inf) after the last step: training has broken down"):
        train(learning_rate=1e30, max_grad_norm=0, max_train_steps=1)
    assert not (output / "lora").exists() and not (output / "report.json").exists()


@pytest.mark.parametrize("alpha", [None, 16])
def test_a_stock_pipeline_loads_the_lora(train: Train, output: Path, pipeline_dir: Path, alpha: int | None) -> None:
    report = train(lora_alpha=alpha, learning_rate=0.03)
    assert report is not None
    weights = load_file(output / "lora" / "pytorch_lora_weights.safetensors")
    assert all(name.startswith("transformer.") and ".lora_" in name for name in weights)
    assert not any(part in name for name in weights for part in ("_orig_mod", "default", "base_model"))
    pipe = stock_pipeline(pipeline_dir)
    plain = picture_of(pipe)
    pipe.load_lora_weights(str(output / "lora"))
    loaded = picture_of(pipe)
    assert not torch.allclose(plain, loaded, atol=1e-3)
    scale = pipe.transformer.transformer_blocks[0].attn.to_q.scaling["default_0"]
    assert scale == (1 if alpha is None else alpha / 4)
    own = {name: tensor for name, tensor in pipe.transformer.state_dict().items() if "lora_" in name}
    assert len(own) == len(weights)
    for name, tensor in own.items():
        assert torch.equal(tensor, weights["transformer." + name.replace(".default_0", "")]), name


def test_checkpointing_changes_no_number(train: Train, output: Path, numbers: Callable[[Path], Any]) -> None:
    runs = {}
    for name, keys in {
        "2/4": {},
        "off": {"gradient_checkpointing_interval": None, "gradient_checkpointing_segment_stride": None}
        | {"gradient_checkpointing": False},
        "ffn": {"gradient_checkpointing_backend": "torch-ffn"},
    }.items():
        report = train(output_dir=str(output / name), **keys)
        assert report is not None
        runs[name] = numbers(output / name)
    assert runs["off"] == runs["2/4"] == runs["ffn"]


def test_the_table_of_settings(train: Train) -> None:
    report = train(max_train_steps=1)
    assert report is not None
    off, ffn, whole, wide, gaps = report["settings"]
    assert [entry["recomputed"] for entry in report["settings"]] == [0, 12, 12, 12, 6]
    assert [entry["ran"] for entry in report["settings"]] == [False, False, False, False, True]
    assert off["held_bytes"] > ffn["held_bytes"] > whole["held_bytes"] > wide["held_bytes"]
    assert wide["held_bytes"] < gaps["held_bytes"] < off["held_bytes"]
    assert off["most_bytes"] == off["held_bytes"]
    assert whole["held_bytes"] < whole["most_bytes"] < wide["most_bytes"] < gaps["most_bytes"] < off["most_bytes"]


OFFLOAD = {
    "gradient_checkpointing_backend": "unsloth-ffn",
    "gradient_checkpointing_interval": None,
    "gradient_checkpointing_segment_stride": None,
    "gradient_checkpointing_offload_attention": True,
    "gradient_checkpointing_offload_min_bytes": 0,
}


def test_offload_changes_no_number(train: Train, output: Path, numbers: Callable[[Path], Any]) -> None:
    with cpu_offload():
        report = train(output_dir=str(output / "offload"), **OFFLOAD)
    assert report is not None
    assert report["recomputed_blocks"]["as_expected"]
    assert report["receipt"]["totals"]["d2h_bytes"] > 0
    train(output_dir=str(output / "plain"))
    assert numbers(output / "offload") == numbers(output / "plain")


def test_the_table_of_settings_has_offload_where_it_can_run(train: Train) -> None:
    with cpu_offload():
        report = train(max_train_steps=1, **OFFLOAD)
    assert report is not None
    entries = {setting_name(entry["keys"]): entry for entry in report["settings"]}
    names = ["off", "torch-ffn", "torch", "unsloth-ffn", "unsloth-ffn, attention offload", "unsloth"]
    assert list(entries) == [*names, "torch, interval 2", "torch, interval 2, stride 4"]
    assert [name for name, entry in entries.items() if entry["ran"]] == ["unsloth-ffn, attention offload"]
    assert [name for name, entry in entries.items() if entry["cpu_bytes"]] == names[3:]
    held = [entries[name]["held_bytes"] for name in ("off", "torch-ffn", "unsloth-ffn", names[4])]
    assert held == sorted(held, reverse=True) and len(set(held)) == 4
    assert entries["unsloth"]["held_bytes"] < entries["torch"]["held_bytes"]
    shown = Console(file=io.StringIO(), width=120)
    shown.print(settings_table(report))
    assert isinstance(shown.file, io.StringIO)
    assert "setting kept on CPU at most" in " ".join(shown.file.getvalue().split())


def test_a_setting_that_is_not_among_the_usual_ones_has_a_row_too(train: Train) -> None:
    report = train(max_train_steps=1, gradient_checkpointing_interval=3, gradient_checkpointing_segment_stride=None)
    assert report is not None
    assert len(report["settings"]) == 6
    assert report["settings"][-1]["ran"]
    assert report["settings"][-1]["keys"]["gradient_checkpointing_interval"] == 3


def test_batches_that_cannot_be_as_large_as_was_asked_are_told(train_and_tell: Callable[..., Any]) -> None:
    _, told = train_and_tell(max_train_steps=1, train_batch_size=50)
    assert re.search(r"Batches hold \d+ at most, not 50 \(train_batch_size\)", told)
    _, told = train_and_tell(max_train_steps=1, train_batch_size=1, resume_from_checkpoint=False)
    assert "Batches hold" not in told


def test_accumulated_steps(train: Train, output: Path) -> None:
    report = train(gradient_accumulation_steps=2, max_train_steps=2, lr_scheduler="cosine", lr_warmup_steps=1)
    assert report is not None
    state = json.loads((output / "checkpoint-2" / "state.json").read_text())["run"]
    assert (state["step"], state["batches"]) == (2, 4)


def test_bfloat16(train: Train, output: Path) -> None:
    report = train(
        mixed_precision="bf16", max_train_steps=2, validation_disable=False, validation_num_inference_steps=1
    )
    assert report is not None
    assert (output / "sample-before-after.png").is_file()
    assert report["recomputed_blocks"]["as_expected"]
    weights = load_file(output / "lora" / "pytorch_lora_weights.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_every_weight_can_be_trained(train: Train, output: Path, pipeline_dir: Path) -> None:
    from diffusers import FluxTransformer2DModel

    report = train(model_type="full", learning_rate=1e-4, max_train_steps=2, checkpoint_step_interval=1)
    assert report is not None
    assert report["recomputed_blocks"]["as_expected"]
    trained = FluxTransformer2DModel.from_pretrained(str(output / "transformer"), local_files_only=True).state_dict()
    before = stock_pipeline(pipeline_dir).transformer.state_dict()
    assert trained.keys() == before.keys()
    assert all(not torch.equal(trained[name], before[name]) for name in trained if name.endswith("proj_out.weight"))


def test_memory_does_not_grow_with_the_steps(train: Train) -> None:
    tensors: dict[int, int] = {}

    def count(done: StepDone) -> None:
        if done.step in (3, 6):
            gc.collect()
            tensors[done.step] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    train(count, max_train_steps=6, checkpoint_step_interval=100)
    assert tensors[6] <= tensors[3]


def test_more_tokens_than_a_family_takes_are_refused_before_anything_is_written(train: Train, output: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer_max_length: 100000 is not allowed; allowed for flux1: 1 to 512"):
        train(tokenizer_max_length=100_000)
    assert not output.exists()
