"""Compaction rounds as the host plans them: who, when, how far, and what scores."""
