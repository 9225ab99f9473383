"""The operators of blocked tensors, one module a family.

`load` imports them, which fills the registry. The import of this package does not: tensor.py, which they stand on,
imports the registry itself.
"""

import importlib

FAMILIES = (
    "along",
    "collectives",
    "convolution",
    "indexing",
    "losses",
    "normalization",
    "pointwise",
    "pooling",
    "pooling_backward",
    "reduction",
    "shape",
    "shuffle",
    "structural",
    "views",
    "inplace_views",
    "foreach",
    "quick",
)


def load() -> None:
    """Imports every family of operators."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
