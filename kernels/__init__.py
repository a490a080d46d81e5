"""Kernels of Tandem. Import `kernels.ops`.

transformers probes for another distribution of this name; the version below tells it that this is not that one.
"""

__version__ = "0.0.0"
