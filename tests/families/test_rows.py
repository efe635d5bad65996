"""Every statement of a row, checked against the model classes that are installed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowtide import families
from lowtide.measure.build import build_model, import_class
from lowtide.measure.inputs import build_inputs, namespace, sizes_for
from lowtide.measure.parity import run_step
from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.resolve import resolve

ROWS = families.all_families()
REAL_DEPTHS = {
    "flux1": [19, 38],
    "flux2": [8, 48],
    "sd3_medium": [24],
    "sdxl": [87],
    "pixart_sigma": [28],
    "sana": [20],
    "qwen_image": [60],
    "lumina2": [2, 2, 26],
    "wan21_1_3b": [30],
    "wan21_14b": [40],
    "ltx_video_095": [28],
    "z_image_turbo": [2, 2, 30],
    "auraflow": [4, 32],
    "chroma": [19, 38],
    "bria": [8, 28],
    "longcat_image": [10, 20],
    "ovis_image": [6, 27],
    "flux3_klein": [5, 5, 5, 28],
    "hidream": [16, 32],
    "hunyuan_image": [2, 20, 40],
    "ernie_image": [36],
    "krea2": [2, 2, 28],
    "cogview4": [28],
    "prx": [16],
    "omnigen": [32],
    "ideogram4": [34],
    "kolors": [87],
    "sd15": [38],
    "stable_cascade_c": [192],
    "cosmos2_image": [28],
    "anima": [28],
    "anima_text_conditioner": [6],
    "qwen_image_21": [32],
    "ace_step_15": [24],
    "anyflow": [30],
    "cogvideox": [30],
    "cosmos3": [36],
    "cosmos3_edge": [28],
    "hunyuan_video": [2, 20, 40],
    "hunyuan_video_15": [2, 54],
    "kandinsky5_image": [2, 50],
    "kandinsky5_video": [2, 32],
    "ltx2_3": [48],
    "minimax_h3": [2, 50],
    "mochi": [48],
    "sana_video": [20],
}

# A chain's modules hand their very output on, but here the model concatenates the attention output in between.
BROKEN_CHAINS = {("act_mlp", "proj_out"), ("attn.mlp_act_fn", "attn.to_out")}

# Diffusers lists these beside a model's blocks; each runs once in a forward.
NOT_BLOCKS = {
    "HunyuanVideoPatchEmbed",
    "HunyuanVideoTokenRefiner",
    "HunyuanVideo15PatchEmbed",
    "HunyuanVideo15TokenRefiner",
}


@pytest.fixture(params=ROWS, ids=lambda row: row.key)
def row(request):
    return request.param


def _depths(model: nn.Module, row: families.Family) -> list[int]:
    return [len(stack.blocks) for stack in resolve(model, row.stacks)]


def test_the_real_configuration_has_the_parameters_and_depths_that_the_row_says(row):
    model = build_model(row, "real", device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count - row.parameters) <= 0.01 * row.parameters
    assert _depths(model, row) == REAL_DEPTHS[row.key]


@pytest.mark.parametrize("size", ["tiny", "real"])
def test_every_pattern_and_every_path_in_a_block_names_something(row, size):
    model = build_model(row, size, device="meta")
    stacks = resolve(model, row.stacks)
    assert [stack.name for stack in stacks] == [stack.name for stack in row.stacks]
    for stack in stacks:
        inside = [dict(block.named_modules()) for _, block in stack.blocks]
        chains = {path for chain in stack.row.feed_forward for path in chain}
        paths = {*chains, *stack.row.attention, *stack.row.attention_norms}
        assert not chains & set(stack.row.attention_norms), "a norm is of one side"
        optional = {"attn2"} if row.key == "sd3_medium" else set()  # the 3.5 models have it
        assert {path for path in paths if not any(path in modules for modules in inside)} <= optional


def test_tiny_models_are_deep_enough_for_intervals_and_strides(row):
    assert max(_depths(build_model(row, "tiny"), row)) >= 8


def test_blocks_are_listed_in_the_order_in_which_the_model_calls_them(row):
    model = build_model(row)
    names = [name for stack in resolve(model, row.stacks) for name, _ in stack.blocks]
    called = []
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    model(**build_inputs(row.tiny))
    assert called == names


def test_every_block_of_a_tiny_model_gets_a_gradient(row):
    model = build_model(row)
    step = run_step(model, build_inputs(row.tiny))
    for stack in resolve(model, row.stacks):
        for name, block in stack.blocks:
            gradients = [step.gradients[f"{name}.{weight}"] for weight, _ in block.named_parameters()]
            assert any(gradient is not None and bool(gradient.any()) for gradient in gradients), name


def test_block_classes_are_the_classes_of_the_blocks(row):
    model = build_model(row, device="meta")
    classes = {type(block).__name__ for stack in resolve(model, row.stacks) for _, block in stack.blocks}
    assert set(row.block_classes) == classes
    assert set(import_class(row.class_path)._repeated_blocks or ()) <= classes | NOT_BLOCKS


def test_variants_run_and_change_the_result(row):
    model = build_model(row)
    plain = run_step(model, build_inputs(row.tiny))
    for variant in row.variants.values():
        other = run_step(model, build_inputs(row.tiny, variant=variant))
        assert not torch.equal(plain.loss, other.loss)


def test_sizes_read_from_a_configuration_are_those_of_the_row(row):
    for size, build in (("tiny", row.tiny), ("real", row.real)):
        model = build_model(row, size, device="meta")
        decided = sizes_for(row.sizes, dict(model.config))
        assert decided == {name: build.vars[name] for name in row.sizes}
        assert namespace(build, decided) == namespace(build)


def test_rows_are_plain_data(row):
    for build in (row.tiny, row.real):
        assert json.loads(json.dumps(build.inputs)) == build.inputs
        json.dumps(build.config)
    assert json.loads(json.dumps(row.variants)) == row.variants


# ---------------------------------------------------------------------- feed-forward and attention, as really called


class _Calls:
    """What each module inside the blocks was given and gave, by identity, in one forward."""

    def __init__(self) -> None:
        self.arguments: dict[nn.Module, list[torch.Tensor]] = {}
        self.outputs: dict[nn.Module, list[torch.Tensor]] = {}
        self.active: list[nn.Module] = []

    def enter(self, module, args, kwargs):
        self.active.append(module)
        self.arguments[module] = list(tensors_of((args, kwargs)))

    def leave(self, module, args, kwargs, output):
        self.active.pop()
        self.outputs[module] = list(tensors_of(output))

    def hands_to(self, first: nn.Module, second: nn.Module) -> bool:
        return any(a is b for a in self.outputs.get(first, ()) for b in self.arguments.get(second, ()))

    def feeds(self, first: nn.Module, second: nn.Module) -> bool:
        """As ``hands_to``, parts of a tensor included."""
        given = self.arguments.get(second, ())
        return any(a is b or a is b._base for a in self.outputs.get(first, ()) for b in given)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[_Calls]:
    calls = _Calls()
    for module in model.modules():
        module.register_forward_pre_hook(calls.enter, with_kwargs=True)
        module.register_forward_hook(calls.leave, with_kwargs=True)
    yield calls


def test_feed_forward_chains_run_from_the_norm_that_feeds_them_to_the_last_module_fed(row):
    model = build_model(row)
    with _recorded(model) as calls:
        model(**build_inputs(row.tiny))
    chains = [
        (block, chain)
        for stack in resolve(model, row.stacks)
        for _, block in stack.blocks
        for chain in stack.chains(block)
    ]
    assert chains
    for block, chain in chains:
        for (name, first), (next_name, second) in pairwise(chain):
            assert calls.hands_to(first, second) != ((name, next_name) in BROKEN_CHAINS), (name, next_name)
        members = {module for _, module in chain}
        for name, other in block.named_modules():
            if "norm" in name and other not in members:
                fed = {module for module in block.modules() if calls.feeds(other, module)}
                assert chain[0][1] not in fed or fed - members, f"{name} feeds {chain[0][0]} and nothing else"
                assert not calls.hands_to(chain[-1][1], other), f"{chain[-1][0]} feeds {name}"


class _SoftmaxAttention(TorchFunctionMode):
    """Notes which modules are running when the attention kernel is called."""

    def __init__(self, calls: _Calls) -> None:
        self.calls = calls
        self.seen: list[list[nn.Module]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.seen.append(list(self.calls.active))
        return func(*args, **(kwargs or {}))


def test_attention_names_every_softmax_attention_of_the_blocks_and_nothing_else(row):
    model = build_model(row)
    with _recorded(model) as calls, _SoftmaxAttention(calls) as kernel:
        model(**build_inputs(row.tiny))
    blocks = [(block, stack.row) for stack in resolve(model, row.stacks) for _, block in stack.blocks]
    declared = {module for block, stack in blocks for name, module in block.named_modules() if name in stack.attention}
    used = {module for active in kernel.seen for module in active if module in declared}
    assert used == declared
    all_blocks = {block for block, _ in blocks}
    inside = [active for active in kernel.seen if all_blocks & set(active)]
    assert inside and all(declared & set(active) for active in inside)


def _is_norm(name: str, module: nn.Module) -> bool:
    """By name or class; what only makes shift and scale for a norm is none, whatever it is called."""
    words = f"{name} {type(module).__name__}".lower()
    return "norm" in words and "modulation" not in words


def _norms_before(attention: nn.Module, block: nn.Module, calls: _Calls) -> set[nn.Module]:
    """Norms of ``block`` from which ``attention`` gets a value that no other module has changed since."""
    while len(children := list(block.children())) == 1:  # a wrapper
        block = children[0]
    given = calls.arguments.get(block, [])
    ends = {tensor.grad_fn for tensor in given}
    makers = {
        tensor.grad_fn: module
        for _, module in block.named_children()
        for tensor in calls.outputs.get(module, ())
        if module is not attention
    }
    norms = {module for name, module in block.named_children() if _is_norm(name, module)}
    found, pending, seen = set(), [tensor.grad_fn for tensor in calls.arguments.get(attention, ())], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        if node in makers:
            found |= {makers[node]} & norms
        else:
            pending += [before for before, _ in node.next_functions]
    return found


def test_attention_norms_are_those_whose_output_reaches_attention_unchanged_or_modulated(row):
    model = build_model(row)
    with _recorded(model) as calls:
        model(**build_inputs(row.tiny))
    for stack in resolve(model, row.stacks):
        for path, block in stack.blocks:
            attention = {module for name, module in block.named_modules() if name in stack.row.attention}
            norms = {module for _, module in stack.attention_sides(block)} - attention
            assert norms == set().union(*(_norms_before(module, block, calls) for module in attention)), path
