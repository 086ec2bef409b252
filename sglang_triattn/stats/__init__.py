"""Query statistics: the file, the folder of kept files, and what they predict. Public: what is imported here."""

from sglang_triattn.stats.file import QueryStats, load_stats, save_stats

__all__ = ["QueryStats", "load_stats", "save_stats"]
