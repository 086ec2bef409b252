"""Scores of cached keys and sizes of cached values: references in torch, kernels in Triton."""
