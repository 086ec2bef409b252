"""The random model that the quality benchmarks are run on."""

from random_model import folder, model

__all__ = ["folder", "model"]
