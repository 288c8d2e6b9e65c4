"""LuminaV: a PyTorch optimizer for networks whose weights live in BF16 or FP16 with no FP32 copy."""

from luminav.gradient_release import ReleaseHandle, enable_gradient_release
from luminav.hyperparameters import preset
from luminav.optimizer import LuminaV
from luminav.param_groups import param_groups
from luminav.planner import plan

__all__ = ["LuminaV", "ReleaseHandle", "__version__", "enable_gradient_release", "param_groups", "plan", "preset"]

__version__ = "2.0.0.dev0"
