"""The random model that the benchmarks of quality are run on."""

from random_model import folder, model

__all__ = ["folder", "model"]
