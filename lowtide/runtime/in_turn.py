"""What handles that are attached to one model in turn have in common."""

from dataclasses import dataclass, field

from lowtide.runtime.link import accelerator_or_simulated
from lowtide.runtime.pool import Pool, pool_for
from lowtide.runtime.segment import Depth
from lowtide.runtime.swap import Routes


@dataclass
class InTurn:
    """Generated classes, so that what was compiled for them stays valid; pinned memory, which takes long to get; how
    deep a thread is in calls of theirs: one replays a graph of its own while another is attached.

    max_sizes: see ``Pool``.
    """

    max_sizes: int
    routes: Routes = field(default_factory=Routes)
    depth: Depth = field(default_factory=Depth)
    _pool: Pool | None = None

    def pool(self) -> Pool:
        """Made when something moves for the first time. ConfigError where there is no accelerator to offload from."""
        if self._pool is None:
            self._pool = pool_for(accelerator_or_simulated(), self.max_sizes)
        return self._pool

    def trim(self) -> None:
        """Free the buffers that nobody uses now."""
        if self._pool is not None:
            self._pool.trim()

    def close(self) -> None:
        """After the last handle."""
        if self._pool is not None:
            self._pool.close()
