"""Which tokens stay: the reference in torch, kernels in Triton. The names defined here need neither."""

SHARED = ("shared-mean", "union")
"""Selections with one kept set for all heads."""

SELECTIONS = (*SHARED, "per-head", "per-layer-head")
