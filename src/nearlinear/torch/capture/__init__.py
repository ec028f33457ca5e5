"""Capturing a PyTorch model's graph: operators with their costs, and the tensors that pass between them."""

from nearlinear.torch.capture.exported import DRAFT, NON_STRICT, STRICT
from nearlinear.torch.capture.ladder import MODULES, RUNGS, Captured, capture

__all__ = ["DRAFT", "MODULES", "NON_STRICT", "RUNGS", "STRICT", "Captured", "capture"]
