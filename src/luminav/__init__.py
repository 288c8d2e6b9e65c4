"""LuminaV: a PyTorch optimizer for networks whose weights live in BF16 or FP16 with no FP32 copy."""

from luminav.optimizer import LuminaV
from luminav.param_groups import param_groups

__all__ = ["LuminaV", "__version__", "param_groups"]

__version__ = "2.0.0.dev0"
