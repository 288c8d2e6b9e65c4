"""The foreach engine: the rule over many tensors at once.

``torch._foreach_*`` has no integer operations and no per-tensor reductions with a dtype, so the tensors of a batch are
laid side by side in a flat buffer instead: one call per operation for all of them, and the very functions of
``rule.py``. Large tensors are still cut into pieces, so scratch memory does not grow with the model.
"""

from __future__ import annotations

from luminav.engines.single import SingleEngine


class ForeachEngine(SingleEngine):
    """The single engine with bundles of several tensors."""

    name = "foreach"
    pack = True
