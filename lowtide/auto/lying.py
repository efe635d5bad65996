"""What lies on the device while a step runs, whatever becomes of activations: what is there when it begins, whoever's
it is, and what training has yet to put there."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lowtide.measure.meter import Meter
from lowtide.measure.residents import residents

_SAMPLE = 4


class Lying:
    """Of one model. meter: of its device; without one, what a forecast says.

    updated: whether the optimizer has updated weights of the model, so that its states are there.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], meter: Meter | None) -> None:
        self.updated = False
        self._model = model
        self._meter = meter
        self._expected = residents(model, inputs)
        self._sample: list[nn.Parameter] = []
        self.look_at_weights()
        self._ran = False
        self._failures = 0 if meter is None else meter.failures()

    def look_at_weights(self) -> None:
        """Others may be trained than before."""
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._sample = trained[:: max(1, len(trained) // _SAMPLE)]

    @property
    def reserved_bytes(self) -> int:
        """What the allocator takes beyond that, as long as nothing is known: a forecast."""
        return self._expected.reserved_bytes if self._meter is not None else 0

    def now_bytes(self) -> int:
        """Now, with gradients that backward will make, and the workspace of libraries before a first step."""
        if self._meter is None:
            return self._expected.total_bytes
        workspace, self._ran = 0 if self._ran else self._expected.workspace_bytes, True
        return self._meter.allocated() + self._missing_gradients() + workspace

    def has_gradients(self) -> bool:
        """Whether gradients of an earlier backward lie there, by some of the weights: it is asked before every step."""
        return any(weight.grad is not None for weight in self._sample)

    def to_come_bytes(self) -> int:
        """What the first update will put there: states of the optimizer, as AdamW has them."""
        return 0 if self.updated or self._meter is None else self._expected.states_bytes

    def ran_out(self) -> bool:
        """Whether the allocator has had too little since the last call."""
        if self._meter is None:
            return False
        before, self._failures = self._failures, self._meter.failures()
        return self._failures > before

    def _missing_gradients(self) -> int:
        trained = (weight for weight in self._model.parameters() if weight.requires_grad)
        return sum(weight.nbytes for weight in trained if weight.grad is None)
