"""Tests under gpu/ need a CUDA card and are collected only where there is one."""

import pytest
import torch

from tests.auto.models import ROUNDS

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
torch.set_num_threads(1)


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` settles after fewer steps, of which each is like those that are left out."""
    monkeypatch.setattr("lowtide.auto.measuring._ROUNDS", ROUNDS)
