"""Moves of kept K/V: the reference in torch, kernels in Triton."""
