"""Which tokens stay: the reference in torch, kernels in Triton."""
