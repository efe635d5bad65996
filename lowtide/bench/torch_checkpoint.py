"""torch's own checkpoint around every block of a model, as long as a ``with`` lasts: what lowtide is compared with."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def checkpointed(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Each block's forward runs in ``torch.utils.checkpoint.checkpoint``, not reentrant."""
    wrapped = list(blocks)
    for block in wrapped:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in wrapped:
            del block.forward
