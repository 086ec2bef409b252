"""An SGLang plugin, only for tests: without a CUDA device, memory that SGLang's LoRA wants pinned stays ordinary.

Pinning only makes copies to a GPU faster. SGLang's LoRA layers pin without asking their platform, which torch refuses
on a machine without an accelerator; everything else in them runs on CPUs.
"""

from __future__ import annotations

import functools

import torch


def activate() -> None:
    if torch.cuda.is_available():
        return
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def unpinned(make):
    @functools.wraps(make)
    def made(*arguments, **options):
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return made
