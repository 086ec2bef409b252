"""A request's options, and its life: who owns which part of its row."""
