"""Stores that move whatever they may, tensors and graphs for them, and what must be left of those: nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.placeholder import unpack
from lowtide.runtime.store import Store, Ticket
from tests.runtime.toys import step


def store_of(model: nn.Module | None = None, **options: Any) -> Store:
    store = Store(model, **{"min_bytes": 1, **options})
    store.begin_step(timed=False)
    return store


@contextmanager
def saving(store: Store) -> Iterator[None]:
    with saved_tensors_hooks(store.pack, unpack):
        try:
            yield
        finally:
            store.flush()


def moved(store: Store, *tensors: torch.Tensor) -> list[Ticket]:
    tickets = [store.move(tensor) for tensor in tensors]
    store.flush()
    assert all(ticket is not None for ticket in tickets)
    return tickets  # type: ignore[return-value]


def assert_gave_all_back(store: Store) -> None:
    assert store.pool.in_use_bytes == 0
    assert store.in_flight_bytes == 0
    assert store.ahead_bytes == 0


def gradients(store: Store, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    def run() -> torch.Tensor:
        with saving(store):
            return model(x)

    return step(model, run)


def made(*shape: int) -> torch.Tensor:
    """A tensor with a graph, as activations have, and a storage of its own."""
    return torch.randn(*shape, requires_grad=True) * 2


def deep(store: Store, depth: int, x: torch.Tensor) -> tuple[torch.Tensor, list[StorageWeakRef]]:
    """sin after sin: each saves its argument, which nobody else holds."""
    storages = []
    with saved_tensors_hooks(store.pack, unpack):
        for _ in range(depth):
            x = x.sin()
            storages.append(StorageWeakRef(x.untyped_storage()))
            store.flush()
    return x, storages
