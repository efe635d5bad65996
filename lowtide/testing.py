"""For tests without an accelerator: offload of CPU tensors, through the same store and pool."""

from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.runtime.link import simulated
from lowtide.runtime.store import alive


@contextmanager
def cpu_offload() -> Iterator[None]:
    """Inside it, what is attached to a CPU model offloads by synchronous copies within CPU memory.

    It saves no memory and no time; it shows what is moved, and that gradients stay the same.
    """
    token = simulated.set(True)
    try:
        yield
    finally:
        simulated.reset(token)


def pool_bytes() -> int:
    """Bytes of CPU buffers that all stores of this process have, in use or free."""
    return sum(store.pool.total_bytes for store in alive)


def release_pool() -> None:
    """Free the CPU buffers that no graph uses."""
    for store in alive:
        store.pool.trim()
