"""What a step did, seen from below: operators that ran, bytes that were copied, storages that are still alive.

Nothing here asks lowtide.
"""

import itertools
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SOFTMAX = torch.ops.aten._softmax.default


class Observer(TorchDispatchMode):
    """Sees every operator of a step. Call ``forward_is_over`` between forward and backward.

    kernels: attention kernels that ran, backward's recomputation included. out_bytes, back_bytes: copied as flat bytes,
    which no model does, before and after the end of forward. alive_bytes: of storages that were made in forward and
    lived when it ended, the model's weights and buffers in CPU memory left out. left_bytes: of those, what still lived
    at the end. first: saw the model's first forward, in which it may make itself a table (for rotary embeddings); what
    was left then is the model's.
    """

    def __init__(self, model: nn.Module, first: "Observer | None" = None) -> None:
        super().__init__()
        self.kernels = self.out_bytes = self.back_bytes = self.alive_bytes = self.left_bytes = 0
        self._in_forward = True
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._others = {
            tensor.untyped_storage()._cdata for tensor in itertools.chain(model.parameters(), model.buffers())
        } | (first._made.keys() if first is not None else set())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard doubles the cost of an operator

    def forward_is_over(self) -> None:
        self._in_forward = False
        self.alive_bytes = self._still_alive()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self.left_bytes = self._still_alive()

    def _still_alive(self) -> int:
        self._made = {key: (storage, size) for key, (storage, size) in self._made.items() if not storage.expired()}
        return sum(size for key, (_, size) in self._made.items() if key not in self._others)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is FUSED or (function is SOFTMAX and args[0].dim() == 4):  # attention by plain matrix products
            self.kernels += 1
        elif function is torch.ops.aten.copy_.default and args[0].dtype is torch.uint8:
            self._count_copy(args[0], args[1])
        if self._in_forward:
            self._note(result)
        return result

    def _count_copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self._in_forward:
            self.out_bytes += source.nbytes
            self._others.add(to.untyped_storage()._cdata)
        else:
            self.back_bytes += source.nbytes

    def _note(self, result: Any) -> None:
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                # The weak reference keeps the key from being given to another storage.
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
