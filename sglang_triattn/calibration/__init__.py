"""Measuring query statistics: texts, prompts, sums, the place to resume, and the engine on transformers."""
