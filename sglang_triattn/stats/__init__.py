"""Query statistics: the file, the per-user cache, and what they predict. Public names are imported here."""

from sglang_triattn.stats.file import QueryStats, load_stats, save_stats

__all__ = ["QueryStats", "load_stats", "save_stats"]
