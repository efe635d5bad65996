"""How PyTorch's allocator is set up where it is held to a budget. Imports nothing: it is read before torch is."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Of which the first is the newer name."""
SMALLEST_PAGES = "large_segment_size_mb:12"
"""20 by default. Part of a page is lost at each end of what lies alone."""
SETTINGS = f"expandable_segments:True,{SMALLEST_PAGES}"
"""Segments that grow by pages (https://docs.pytorch.org/docs/stable/notes/cuda.html): else a tenth of what is reserved
lies in pieces that fit nothing."""
EARLIER = "expandable_segments:False"
"""As it is where nobody chooses."""
