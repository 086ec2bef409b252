"""Compaction rounds: when they run, how they run together, and what happens if one fails."""
