"""Tests under gpu/ need a CUDA card and are collected only where there is one."""

import torch

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
torch.set_num_threads(1)
