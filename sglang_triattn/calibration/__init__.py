"""Measuring query statistics: texts, prompts, sums, saved progress, and the transformers engine."""
