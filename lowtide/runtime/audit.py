"""Looks for weights that train in name only."""

from torch import nn


def audit(model: nn.Module) -> list[str]:
    """Names of the trainable parameters that have no gradient. Call it after a backward, before the optimizer's step.

    An empty list is the good answer. A checkpoint that loses gradients still gives a finite loss that falls while other
    weights learn, so nothing else tells. Parameters that a step leaves out on purpose (another expert's, say) are
    listed too: whoever calls it knows which those are.
    """
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
