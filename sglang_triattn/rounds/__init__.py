"""Compaction rounds as the host plans them: who, when and how far, and the scorer they use."""
