"""Traces what one plain forward saves for backward: the facts that ``plan.held`` predicts from."""

import inspect
import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.attention_backend import entry_points
from lowtide.errors import ConfigError
from lowtide.measure.flops import FlopCounter, attention_flops
from lowtide.measure.gpu_kernels import GpuKernels
from lowtide.measure.shapes import Shapes
from lowtide.plan.held import ATTENTION_SIDE, BLOCK, FEED_FORWARD, KERNEL, HeldTrace, ModuleCall, TensorUse, Work
from lowtide.runtime.entry_points import SDPA, EntryPoint, Kernel, Watching, unwatched
from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.kernel_arguments import mask_to_add, with_additive_mask
from lowtide.runtime.resolve import ResolvedStack
from lowtide.runtime.selective import MOST_KEPT

_TOO_LARGE = "overflow"  # so torch says that no memory could hold a tensor


def trace_held(
    model: nn.Module, stacks: Sequence[ResolvedStack], inputs: Mapping[str, Any], *, as_on_gpu: bool = False
) -> HeldTrace:
    """One forward of an un-attached model with gradients on; no backward.

    A model on the meta device takes no memory (``measure.shapes``), and attention counts as a fused kernel holds it
    (``fused_attention``). Its inputs are on the meta device, too, but for whole numbers and masks, which may decide
    shapes. Raises ConfigError where its forward cannot run there: says what it asked for.

    as_on_gpu: on the meta device, what other operators save is what kernels of a GPU save (``measure.gpu_kernels``).
    """
    tracer = _Tracer(model, stacks)
    with ExitStack() as watched, torch.enable_grad():
        if tracer.on_meta:
            inputs = tracer.shapes.take(inputs)
            watched.enter_context(tracer.shapes)
            watched.enter_context(GpuKernels() if as_on_gpu else nullcontext())
        watched.enter_context(tracer.counter)
        watched.enter_context(saved_tensors_hooks(tracer.pack, lambda saved: saved.tensor))
        watched.enter_context(Watching(entry_points(), tracer))
        for handle in tracer.watch():
            watched.callback(handle.remove)
        outputs = _forward(model, inputs, tracer)
        trace = HeldTrace(
            tuple(tracer.calls),
            frozenset(tracer.glue),
            tracer.live(),
            tracer.sizes_bytes,
            tracer.work(),
            tracer.tokens,
        )
    del outputs  # the graph had to live until now
    return trace


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention for the meta device, where torch's own falls back to saving the attention matrix.

    query, key, value: (batch, heads, tokens, width). Saves what FlashAttention and its like save on a GPU: arguments,
    output and log-sum-exp; of a boolean mask the additive one that torch makes of it. What no fused kernel takes
    (values of another width than queries, say) goes to torch's own.
    """
    if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _forward(model: nn.Module, inputs: Mapping[str, Any], tracer: "_Tracer") -> Any:
    try:
        return model(**inputs)
    except NameError as error:  # diffusers imports what a few models need only where it is installed
        raise ConfigError(
            f"the forward of {type(model).__name__} fails: {error}. Is a library that it needs not installed?"
        ) from error
    except (ConfigError, RuntimeError) as error:
        if not tracer.on_meta:
            raise
        if _TOO_LARGE in str(error):
            raise ConfigError(f"{type(model).__name__} cannot be this large: {error}") from error
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot run on the meta device: {tracer.place}"
            f"{str(error).partition('. ')[0]}. Trace its tiny configuration on the CPU instead"
        ) from error
    except ValueError as error:  # sizes that the model itself refuses
        raise ConfigError(f"the forward of {type(model).__name__} does not take these inputs: {error}") from error


class _Saved:
    """What the graph holds in place of a saved tensor; dies with its branch of the graph."""

    def __init__(self, tensor: torch.Tensor, storage: int) -> None:
        self.tensor = tensor.detach()
        self.storage = storage


@dataclass(eq=False)
class _Region:
    """A call that is going on: what was saved, and which calls ended, in it so far.

    before: the work that was counted when it began.
    """

    module: nn.Module | None
    kind: str
    name: str
    arguments: tuple[TensorUse, ...]
    before: Work
    carry: tuple[int, ...] = ()
    steps: list[int | ModuleCall] = field(default_factory=list)


class _Tracer:
    """Hooks on blocks and the modules of their sides; names tensors and storages by first sight."""

    def __init__(self, model: nn.Module, stacks: Sequence[ResolvedStack]) -> None:
        self.stacks = stacks
        self.on_meta = any(parameter.is_meta for parameter in model.parameters())
        self.shapes = Shapes()
        self.counter = FlopCounter()
        self.calls: list[ModuleCall] = []
        self.glue: set[int] = set()
        self.sizes_bytes: dict[int, int] = {}
        self.tokens = 0
        self._open: list[_Region] = []
        self._saved: WeakSet[_Saved] = WeakSet()
        self._alive: list[torch.UntypedStorage] = []
        self._sights: dict[int, int] = {}  # of storages, the place of each in what is alive
        self._began = 0  # how many were, when the block that is going on began
        self._numbers: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        self._next_number = itertools.count()
        weights = [*model.parameters(), *model.buffers()]
        self._resident = {id(self._kept(tensor)) for tensor in weights}
        if self.on_meta:
            self._resident |= {id(self._kept(self.shapes.stand_in(tensor))) for tensor in weights}

    def watch(self) -> list[RemovableHandle]:
        handles = []
        for stack in self.stacks:
            for index, (path, block) in enumerate(stack.blocks):
                handles += self._watched(block, BLOCK, path, stack.name, index, stack.row.carry)
                for place, (name, module) in enumerate(stack.attention_sides(block)):
                    handles += self._watched(module, ATTENTION_SIDE, f"{path}.{name}", path, place)
                for number, chain in enumerate(stack.chains(block)):
                    for place, (name, module) in enumerate(chain):
                        handles += self._watched(module, FEED_FORWARD, f"{path}.{name}", f"{path}#{number}", place)
        return handles

    def call(self, entry: EntryPoint, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An attention kernel's call, as torch runs it or, on the meta device, as a GPU would."""
        mask = mask_to_add(kernel, args, kwargs)
        if mask is not None and not self._was_there(mask):  # else it is kept: rule 31 of runtime.selective
            args, kwargs = with_additive_mask(mask, args, kwargs)
        if entry is SDPA and any(tensor.is_meta for tensor in tensors_of((args, kwargs))):
            kernel = fused_attention
        if not self._open:
            return self._run(entry, kernel, args, kwargs)
        query = next(iter(tensors_of((args, kwargs))))
        self.tokens = max(self.tokens, query.shape[-2 if entry is SDPA else 1])
        block = self._open[0].name
        name = f"{self._open[-1].name}.kernel"
        self._open.append(_Region(None, KERNEL, name, self._uses((args, kwargs)), self.work()))
        output = self._run(entry, kernel, args, kwargs)
        self._close(block, 0, output)
        return output

    def _was_there(self, tensor: torch.Tensor) -> bool:
        """Whether it was seen before the block that is going on."""
        return self._sights.get(id(tensor.untyped_storage()), self._began) < self._began

    def _run(self, entry: EntryPoint, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if entry is SDPA or self.on_meta:
            return unwatched(kernel, args, kwargs)
        with self.counter.paused():  # a kernel of another library: nobody knows its operators
            output = unwatched(kernel, args, kwargs)
        query, key, value = (tensor.transpose(1, 2).shape for tensor in itertools.islice(tensors_of((args, kwargs)), 3))
        self.counter.total += attention_flops(query, key, value, is_causal=kwargs.get("is_causal", False))
        return output

    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor, self._storage_of(tensor))
        if self._open:
            self._open[-1].steps.append(saved.storage)
        else:
            self.glue.add(saved.storage)
        self._saved.add(saved)
        return saved

    @property
    def place(self) -> str:
        """Where the forward is, for a message."""
        return f"in {self._open[-1].name}, " if self._open else ""

    def work(self) -> Work:
        """What ran so far."""
        return Work(self.counter.total, self.counter.operators, self.counter.recorded)

    def live(self) -> frozenset[int]:
        return frozenset(saved.storage for saved in self._saved)

    def _watched(
        self, module: nn.Module, kind: str, name: str, stack: str, index: int, carry: Sequence[str] = ()
    ) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if bool(self._open) is (kind != BLOCK):  # a block inside a block is part of it
                carried = self._carried(module, carry, args, kwargs) if carry else ()
                uses = self._uses((args, kwargs))
                if kind == BLOCK:
                    self._began = len(self._alive)
                self._open.append(_Region(module, kind, name, uses, self.work(), carried))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._open and self._open[-1].module is module and self._open[-1].kind == kind:
                self._close(stack, index, output)

        return (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            # A module of two sides has two pairs of hooks: the one that entered last leaves first.
            module.register_forward_hook(leave, with_kwargs=True, prepend=True),
        )

    def _close(self, stack: str, index: int, output: Any) -> None:
        region = self._open.pop()
        call = ModuleCall(
            region.name,
            stack,
            index,
            region.arguments,
            self._uses(output),
            tuple(region.steps),
            region.kind,
            carry=region.carry,
            work=self.work() - region.before,
        )
        if call.kind == KERNEL:
            call = replace(call, results=self._kept_of(call))
        if self._open:
            self._open[-1].steps.append(call)
        else:
            self.calls.append(call)

    def _carried(
        self, module: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, ...]:
        """The tensors among the arguments that go by these names."""
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        tensors = [given[name] for name in names if isinstance(given.get(name), torch.Tensor)]
        return tuple(self._number_of(tensor) for tensor in tensors)

    def _kept_of(self, kernel: ModuleCall) -> tuple[int, ...]:
        """What the selective scope keeps of a kernel: see runtime.selective."""
        given = {use.storage for use in kernel.arguments}
        outputs = [use.storage for use in kernel.outputs]
        results = tuple(dict.fromkeys(storage for storage in (*kernel.saved, *outputs) if storage not in given))
        most_bytes = MOST_KEPT * sum(self.sizes_bytes[storage] for storage in outputs)
        keeps = kernel.saved and sum(self.sizes_bytes[storage] for storage in results) <= most_bytes
        return results if keeps else ()

    def _uses(self, value: Any) -> tuple[TensorUse, ...]:
        return tuple(
            TensorUse(self._number_of(tensor), self._storage_of(tensor), tensor.numel(), tensor.requires_grad)
            for tensor in tensors_of(value)
        )

    def _number_of(self, tensor: torch.Tensor) -> int:
        """Names the object without keeping it, and with it the graph behind it, alive."""
        if tensor not in self._numbers:
            self._numbers[tensor] = next(self._next_number)
        return self._numbers[tensor]

    def _storage_of(self, tensor: torch.Tensor) -> int:
        storage = self._kept(tensor)
        if id(storage) not in self._resident:
            self.sizes_bytes[id(storage)] = storage.nbytes()
        return id(storage)

    def _kept(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Its storage, kept alive as long as the trace is made: so its id names it, on the meta device too."""
        storage = tensor.untyped_storage()
        self._sights.setdefault(id(storage), len(self._alive))
        self._alive.append(storage)
        return storage
