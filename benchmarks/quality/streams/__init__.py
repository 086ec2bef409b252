"""Texts with questions, made from a seed, and the file that holds them."""
