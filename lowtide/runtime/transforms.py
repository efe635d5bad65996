"""Transforms of functions, under which nothing of ours may run."""

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C._functorch import peek_interpreter_stack


def transformed() -> bool:
    """Whether a transform of functorch, a trace or forward-mode differentiation is going on."""
    return (
        peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0  # its level has ended by the time of backward
    )
