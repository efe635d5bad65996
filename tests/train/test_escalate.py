"""Memory runs out in a run of the trainer: with ``escalate`` only the log can tell, not weights, states or order."""

import json
import os
import re
import signal
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowtide.auto.handle import AutoHandle
from lowtide.controls import CheckpointConfig
from lowtide.measure.held import trace_held
from lowtide.testing import cpu_offload, pool_bytes
from lowtide.train.adapters import Lora
from lowtide.train.config import TrainConfig
from lowtide.train.dataset import batches
from lowtide.train.escalate import Attached, ladder, trace_shapes
from lowtide.train.flow import random_noise
from lowtide.train.kernels import computing
from lowtide.train.loop import StepDone, load_batch
from lowtide.train.prepare import Prepared, prepare
from lowtide.train.progress import Reporter
from lowtide.train.report import finished, result_lines, setting_name
from lowtide.train.resume import read_state, read_tensors
from lowtide.train.run import run
from lowtide.train.settings import most_bytes, short_keys

Tell = Callable[..., tuple[dict[str, Any] | None, str]]
Numbers = Callable[[Path], Any]
Everything = Callable[[Path], tuple[Any, Any]]

NO_GAPS = {"gradient_checkpointing_interval": None, "gradient_checkpointing_segment_stride": None}
OFF = {"on_out_of_memory": "escalate", "gradient_checkpointing": False, **NO_GAPS}
WIDE = {"on_out_of_memory": "escalate", **NO_GAPS, "gradient_checkpointing_interval": 4}
STEPS = 3
ACCUMULATED = {"gradient_accumulation_steps": 2, "max_train_steps": STEPS, "lr_scheduler": "cosine"}
BLOCKS = 12
FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"
RANDOM = 3
"""The block whose output gets a little noise from torch's own generator, as dropout would draw from it."""


class Scarce:
    """Lets memory run out at chosen points, by hooks as torch offers them to anybody.

    points: by attempt (forwards of the denoiser with gradients, counted from 1) a block, 0 … 11 in the order of
    forward, and whether its forward fails, its backward or its recomputation.
    left_over: how many activations of the attempt before were alive when each began.
    """

    def __init__(self, points: Mapping[int, tuple[int, str]], kind: type[Exception] = torch.OutOfMemoryError) -> None:
        self.points, self.kind = dict(points), kind
        self.attempts = 0
        self.model: nn.Module | None = None
        self.blocks: list[nn.Module] = []
        self.activations: list[StorageWeakRef] = []
        self.left_over: list[int] = []
        self.with_gradient: list[int] = []
        self.errors: list[Exception] = []

    def __enter__(self) -> "Scarce":
        self.handles = (register_module_forward_pre_hook(self.before), register_module_forward_hook(self.after))
        return self

    def __exit__(self, *details: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def before(self, module: nn.Module, args: Any) -> None:
        if type(module).__name__ != "FluxTransformer2DModel" or next(module.parameters()).is_meta:
            return  # the copy whose shapes are traced
        if self.model is None:
            self.model = module
            self.blocks = [child for child in module.modules() if type(child).__name__.endswith("TransformerBlock")]
            assert len(self.blocks) == BLOCKS
        if torch.is_grad_enabled():
            self.attempts += 1
            self.left_over.append(sum(not activation.expired() for activation in self.activations))
            self.activations = []

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        number = next((number for number, block in enumerate(self.blocks) if block is module), None)
        if number is None or not torch.is_grad_enabled():
            return None
        again = torch._C._current_graph_task_id() >= 0
        self.activations += [StorageWeakRef(tensor.untyped_storage()) for tensor in output]
        block, where = self.points.get(self.attempts, (None, None))
        if number == block and where == (RECOMPUTATION if again else FORWARD):
            self.fail()
        if number == block and where == BACKWARD and not again:
            output[-1].register_hook(lambda gradient: self.fail())
        if number == RANDOM:
            return (*output[:-1], output[-1] + 1e-3 * torch.randn(output[-1].shape))
        return None

    def fail(self) -> None:
        assert self.model is not None
        self.with_gradient.append(sum(weight.grad is not None for weight in self.model.parameters()))
        self.errors.append(self.kind("no memory left"))  # kept, as a debugger may: its frames must not hold the graph
        raise self.errors[-1]


def plain(value: Any) -> Any:
    """The same with lists instead of tensors, to be compared with ==."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def everything(numbers: Numbers) -> Everything:
    """Of a finished run in a folder all that may not differ: losses and weights, and the states of random generators,
    optimizer, learning rate and data at its end."""

    def read(output: Path) -> tuple[Any, Any]:
        checkpoint = output / f"checkpoint-{STEPS}"
        return numbers(output), [plain(read_tensors(checkpoint)), read_state(checkpoint).batches]

    return read


@pytest.fixture(scope="module")
def undisturbed(
    small: dict[str, Any], everything: Everything, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Any]:
    """Of a run that has memory enough: the number of its attempts, and everything that may not differ."""
    output = tmp_path_factory.mktemp("undisturbed")
    config = TrainConfig.from_flat({**small, **OFF, **ACCUMULATED, "output_dir": str(output)})
    with Scarce({}) as never:
        run(config, Reporter(Console(quiet=True)))
    return never.attempts, everything(output)


@pytest.mark.parametrize(
    ("points", "keys", "settings"),
    [
        pytest.param({3: (7, FORWARD)}, OFF, ["off", "torch-ffn"], id="forward"),
        pytest.param({3: (7, BACKWARD)}, OFF, ["off", "torch-ffn"], id="half-way through backward"),
        pytest.param({1: (7, BACKWARD)}, OFF, ["off", "torch-ffn"], id="the very first batch"),
        pytest.param({4: (5, BACKWARD)}, OFF, ["off", "torch-ffn"], id="second batch of a step"),
        pytest.param({4: (5, BACKWARD), 5: (9, FORWARD)}, OFF, ["off", "torch-ffn", "torch"], id="twice in a row"),
        pytest.param({2: (0, FORWARD), 5: (2, BACKWARD)}, OFF, ["off", "torch-ffn", "torch"], id="in two steps"),
        pytest.param(
            {4: (5, RECOMPUTATION), 5: (5, RECOMPUTATION)},
            WIDE,
            ["torch, interval 4", "torch, interval 2", "torch"],
            id="recomputation in narrower and narrower segments",
        ),
    ],
)
def test_nothing_but_the_log_can_tell(
    train_and_tell: Tell,
    output: Path,
    everything: Everything,
    undisturbed: tuple[int, Any],
    points: dict[int, tuple[int, str]],
    keys: dict[str, Any],
    settings: list[str],
) -> None:
    with Scarce(points) as scarce:
        report, told = train_and_tell(**keys | ACCUMULATED)
    attempts, expected = undisturbed
    assert everything(output) == expected
    assert scarce.attempts == attempts + len(points)
    assert scarce.left_over == [0] * scarce.attempts
    assert report is not None
    assert report["checkpointing"] == settings[-1]
    steps = [(attempt - before - 1) // 2 + 1 for before, attempt in enumerate(points)]
    history = report["out_of_memory"]
    assert [entry["step"] for entry in history] == steps
    assert [entry["failed"] for entry in history] == settings[:-1]
    assert [entry["next"] for entry in history] == settings[1:]
    assert all(entry["next_bytes"] < entry["failed_bytes"] for entry in history)
    said = re.findall(r"step (\d): out of memory with ([^(]+) \(.+?\).*? the run goes on, with ([^(]+) \(", told)
    assert said == [(str(step), *pair) for step, *pair in zip(steps, settings[:-1], settings[1:], strict=True)]


def test_backward_had_left_gradients_behind(train_and_tell: Tell) -> None:
    with Scarce({1: (7, BACKWARD), 3: (7, BACKWARD)}) as scarce:
        train_and_tell(**OFF | ACCUMULATED)
    some, every = scarce.with_gradient
    assert 0 < some < every


def test_auto_comes_down_to_a_setting_by_name(
    train_and_tell: Tell, output: Path, everything: Everything, undisturbed: tuple[int, Any]
) -> None:
    auto = {"gradient_checkpointing_backend": "auto", "vram_budget": "64GiB"}
    with Scarce({4: (5, BACKWARD), 5: (4, BACKWARD), 6: (3, FORWARD), 7: (5, BACKWARD)}) as scarce:
        report, told = train_and_tell(**NO_GAPS | ACCUMULATED | auto, on_out_of_memory="escalate")
    assert everything(output) == undisturbed[1]
    assert scarce.attempts == undisturbed[0] + 4 and scarce.left_over == [0] * scarce.attempts
    assert report is not None
    *again, last = report["out_of_memory"]
    assert [(entry["failed"], entry["next"], entry["next_bytes"]) for entry in again] == [("auto", "auto", None)] * 3
    peaks = [entry["failed_bytes"] for entry in again]
    assert peaks == sorted(set(peaks), reverse=True)  # auto had left checkpointing off; each plan takes less
    assert (last["failed"], report["checkpointing"]) == ("auto", last["next"]) and last["next"] != "auto"
    assert last["next_bytes"] < last["failed_bytes"]
    assert told.count("planned anew for less: same numbers") == 3


def test_auto_planned_anew_is_enough(
    train_and_tell: Tell, output: Path, everything: Everything, undisturbed: tuple[int, Any]
) -> None:
    auto = {"gradient_checkpointing_backend": "auto", "vram_budget": "64GiB"}
    with Scarce({4: (5, BACKWARD)}) as scarce:
        report, _ = train_and_tell(**NO_GAPS | ACCUMULATED | auto, on_out_of_memory="escalate")
    assert everything(output) == undisturbed[1]
    assert scarce.attempts == undisturbed[0] + 1
    assert report is not None and report["checkpointing"] == "auto"
    assert report["recomputed_blocks"]["receipt"]  # nothing was before
    assert any("with auto: was planned anew for less" in line for line in result_lines(report))


def test_each_step_may_be_planned_anew(
    train_and_tell: Tell, output: Path, everything: Everything, undisturbed: tuple[int, Any]
) -> None:
    auto = {"gradient_checkpointing_backend": "auto", "vram_budget": "64GiB"}
    with Scarce({1: (5, BACKWARD), 2: (4, BACKWARD), 5: (3, FORWARD), 8: (5, BACKWARD)}):
        report, _ = train_and_tell(**NO_GAPS | ACCUMULATED | auto, on_out_of_memory="escalate")
    assert everything(output) == undisturbed[1]
    assert report is not None and report["checkpointing"] == "auto"
    assert [(entry["step"], entry["next"]) for entry in report["out_of_memory"]] == [(n, "auto") for n in (1, 1, 2, 3)]


def test_where_auto_finds_nothing_that_fits_settings_by_name_follow(
    train_and_tell: Tell,
    output: Path,
    everything: Everything,
    undisturbed: tuple[int, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = AutoHandle.note_out_of_memory

    def learns_that_there_is_less(handle: AutoHandle) -> bool:
        assert handle._planner is not None
        handle._planner.budget_bytes = 2**20
        return note(handle)

    monkeypatch.setattr(AutoHandle, "note_out_of_memory", learns_that_there_is_less)
    auto = {"gradient_checkpointing_backend": "auto", "vram_budget": "64GiB"}
    with Scarce({4: (5, BACKWARD)}):
        report, _ = train_and_tell(**NO_GAPS | ACCUMULATED | auto, on_out_of_memory="escalate")
    assert everything(output) == undisturbed[1]
    assert report is not None and report["checkpointing"] == "torch-ffn"
    assert [entry["next"] for entry in report["out_of_memory"]] == ["auto", "torch-ffn"]


def test_the_setting_from_the_start_gives_the_same(train_and_tell: Tell, output: Path, everything: Everything) -> None:
    with Scarce({4: (5, BACKWARD), 5: (9, FORWARD)}):
        report, _ = train_and_tell(**OFF | ACCUMULATED, output_dir=str(output / "scarce"))
    with Scarce({}):
        same, _ = train_and_tell(**NO_GAPS | ACCUMULATED, output_dir=str(output / "torch"))
    assert everything(output / "scarce") == everything(output / "torch")
    assert report is not None and same is not None
    assert report["receipt"] == same["receipt"]
    assert report["settings"] == same["settings"]
    assert report["recomputed_blocks"] == same["recomputed_blocks"]
    assert len(report["recomputed_blocks"]["receipt"]) == BLOCKS


def test_every_weight_with_accumulated_gradients(train_and_tell: Tell, output: Path) -> None:
    keys = {**OFF, **ACCUMULATED, "model_type": "full", "learning_rate": 1e-4}
    with Scarce({}):
        train_and_tell(**keys, output_dir=str(output / "plenty"))
    with Scarce({4: (5, BACKWARD)}):
        train_and_tell(**keys, output_dir=str(output / "scarce"))
    states = [plain(read_tensors(output / name / f"checkpoint-{STEPS}")) for name in ("plenty", "scarce")]
    assert states[0] == states[1]
    weights = [(output / name / "transformer" / "diffusion_pytorch_model.safetensors") for name in ("plenty", "scarce")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_offload_is_a_rung_where_it_can_run(
    train_and_tell: Tell, output: Path, everything: Everything, undisturbed: tuple[int, Any]
) -> None:
    before = pool_bytes()
    with cpu_offload(), Scarce({3: (6, RECOMPUTATION), 5: (8, FORWARD)}) as scarce:
        report, _ = train_and_tell(**WIDE, **ACCUMULATED, gradient_checkpointing_offload_min_bytes=0)
    assert everything(output) == undisturbed[1]
    assert report is not None
    history = [(entry["failed"], entry["next"]) for entry in report["out_of_memory"]]
    assert history == [
        ("torch, interval 4", "unsloth, interval 4"),
        ("unsloth, interval 4", "unsloth, interval 2"),
    ]
    assert report["receipt"]["totals"]["d2h_bytes"] > 0
    assert scarce.left_over == [0] * scarce.attempts
    assert pool_bytes() == before


def test_metrics_and_report_name_the_setting(train_and_tell: Tell, output: Path, flat: dict[str, Any]) -> None:
    with Scarce({2: (7, FORWARD)}):
        report, _ = train_and_tell(**OFF, max_train_steps=STEPS)
    assert report is not None
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["checkpointing"] for line in lines] == ["off", "torch-ffn", "torch-ffn"]
    assert json.loads((output / "report.json").read_text())["out_of_memory"] == report["out_of_memory"]
    assert "Out of memory in step 2 with off: went on with torch-ffn" in list(result_lines(report))
    assert [setting_name(entry["keys"]) for entry in report["settings"] if entry["ran"]] == ["torch-ffn"]
    assert report["config"]["gradient_checkpointing"] is False
    wanted = {**flat, **OFF, "max_train_steps": STEPS}
    assert finished(TrainConfig.from_flat({**wanted, "on_out_of_memory": "raise"})) == report


def interrupted_after(step: int) -> Callable[[StepDone], None]:
    return lambda done: os.kill(os.getpid(), signal.SIGINT) if done.step == step else None


@pytest.fixture
def come_down(train_and_tell: Tell, output: Path) -> Path:
    """A run that has come to torch-ffn and was then stopped after its second step."""
    with Scarce({2: (7, BACKWARD)}):
        report, _ = train_and_tell(
            interrupted_after(2), **OFF, max_train_steps=STEPS, output_dir=str(output / "scarce")
        )
    assert report is None
    return output / "scarce"


def test_a_resumed_run_goes_on_with_what_it_had_come_to(
    train_and_tell: Tell, output: Path, come_down: Path, everything: Everything
) -> None:
    with Scarce({}):
        report, told = train_and_tell(**OFF, max_train_steps=STEPS, output_dir=str(come_down))
    with Scarce({}):
        train_and_tell(**OFF, max_train_steps=STEPS, output_dir=str(output / "plenty"))
    assert report is not None
    assert report["checkpointing"] == "torch-ffn"
    assert [entry["step"] for entry in report["out_of_memory"]] == [2]
    assert "checkpointing: torch-ffn, for memory ran out with off" in told
    assert everything(come_down) == everything(output / "plenty")


def test_a_resumed_run_goes_down_from_there(train_and_tell: Tell, come_down: Path) -> None:
    with Scarce({1: (7, FORWARD)}):
        report, _ = train_and_tell(**OFF, max_train_steps=STEPS, output_dir=str(come_down))
    assert report is not None
    assert [(entry["step"], entry["next"]) for entry in report["out_of_memory"]] == [(2, "torch-ffn"), (3, "torch")]


def test_a_resumed_run_takes_new_keys(train_and_tell: Tell, come_down: Path) -> None:
    keys = {**OFF, "gradient_checkpointing": True, "gradient_checkpointing_interval": 2}
    with Scarce({}):
        report, told = train_and_tell(**keys, max_train_steps=STEPS, output_dir=str(come_down))
    assert report is not None
    assert report["checkpointing"] == "torch, interval 2"
    assert "memory ran out" not in told


def test_what_needs_an_accelerator_is_left_where_there_is_none(train_and_tell: Tell, output: Path) -> None:
    keys = {**WIDE, "gradient_checkpointing_interval": None, "gradient_checkpointing_offload_min_bytes": 0}
    with cpu_offload(), Scarce({1: (7, FORWARD)}):
        train_and_tell(interrupted_after(2), **keys)
    assert read_state(output / "checkpoint-2").setting["gradient_checkpointing_backend"] == "unsloth"
    with Scarce({}):
        report, _ = train_and_tell(**keys)
    assert report is not None
    assert report["checkpointing"] == "torch"


def test_no_rung_left_is_the_original_error(train_and_tell: Tell, output: Path) -> None:
    points = {1: (7, BACKWARD), 2: (7, BACKWARD), 3: (7, BACKWARD)}
    with Scarce(points) as scarce, pytest.raises(torch.OutOfMemoryError) as caught:
        train_and_tell(**OFF)
    assert str(caught.value) == "no memory left"
    assert caught.value is scarce.errors[-1]
    assert scarce.attempts == len(points)
    (note,) = caught.value.__notes__
    assert re.search(
        r"^Step 1: no setting of checkpointing is left. Tried: off \(.+\), torch-ffn \(.+\), torch \(", note
    )
    assert re.search(
        r"None of the others needs less by prediction: torch-ffn \(.+\), torch \(.+\)\. What is left:", note
    )
    assert "smaller train_batch_size" in note
    assert any(line.name == "fail" for line in traceback.extract_tb(caught.value.__traceback__))
    assert not (output / "report.json").exists()


def test_raise_raises(train_and_tell: Tell) -> None:
    with Scarce({2: (7, FORWARD)}) as scarce, pytest.raises(torch.OutOfMemoryError, match="^no memory left$") as caught:
        train_and_tell(**OFF | {"on_out_of_memory": "raise"})
    assert scarce.attempts == 2
    assert not hasattr(caught.value, "__notes__")


def test_other_errors_are_not_caught(train_and_tell: Tell) -> None:
    with Scarce({2: (7, BACKWARD)}, kind=RuntimeError) as scarce, pytest.raises(RuntimeError, match="no memory left"):
        train_and_tell(**OFF)
    assert scarce.attempts == 2


@pytest.mark.parametrize(
    ("keys", "offload", "names"),
    [
        ({"backend": None}, False, ["torch-ffn", "torch"]),
        ({"backend": None}, True, ["torch-ffn", "torch", "unsloth"]),
        (
            {"backend": None, "offload_attention": True},
            True,
            ["torch-ffn, attention offload", "torch", "unsloth"],
        ),
        ({"backend": "torch-ffn", "interval": 2, "segment_stride": 4}, False, ["torch-ffn", "torch"]),
        (
            {"backend": "torch", "interval": 5, "segment_stride": 8},
            False,
            ["torch-ffn", "torch, interval 5", "torch, interval 2", "torch"],
        ),
        (
            {"backend": "torch-selective", "interval": 100},
            True,
            ["torch-ffn", "torch, interval 8", *(f"unsloth, interval {width}" for width in (8, 4, 2)), "unsloth"],
        ),
    ],
)
def test_the_ladder(prepared: Prepared, keys: dict[str, Any], offload: bool, names: list[str]) -> None:
    config = CheckpointConfig.for_attach(**keys, offload_min_bytes=7)
    denoiser = prepared.row.open_denoiser(prepared.config.keys.pipeline, prepared.device, prepared.dtype)
    with Attached(denoiser.model, "flux1", CheckpointConfig()) as attached:
        rungs = list(ladder(config, attached.handle.stacks, offload))
    assert [setting_name(short_keys(rung)) for rung in rungs] == names
    assert {rung.offload_min_bytes for rung in rungs} == {7}


@pytest.mark.parametrize(("precision", "off_by"), [("no", 0), ("bf16", 0.005)])
def test_shapes_predict_what_a_forward_saves(flat: dict[str, Any], precision: str, off_by: float) -> None:
    config = TrainConfig.from_flat({**flat, "mixed_precision": precision})
    prepared = prepare(config, Reporter(Console(quiet=True)))
    denoiser = prepared.row.open_denoiser(config.keys.pipeline, prepared.device, prepared.dtype)
    Lora(denoiser, prepared.row.lora_targets, 4, None)
    batch = load_batch(prepared.cached, next(batches(prepared.cached.buckets, 2, 0)), prepared.device)
    noised = random_noise(denoiser, batch.latents, torch.Generator())
    arguments = denoiser.arguments(noised.latents, noised.sigmas, batch.text)
    with Attached(denoiser.model, "flux1", CheckpointConfig()) as attached:
        stacks, shapes = trace_shapes(attached, arguments, config.keys, prepared.device)
    with computing(precision, prepared.device):
        real = trace_held(denoiser.model, attached.handle.stacks, arguments)
    for setting in (
        CheckpointConfig(gradient_checkpointing=False),
        *ladder(CheckpointConfig(interval=4), stacks, True),
    ):
        expected = most_bytes(setting, attached.handle.stacks, real)
        assert most_bytes(setting, stacks, shapes) == pytest.approx(expected, rel=off_by), setting
