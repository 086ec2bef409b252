"""Hooks into SGLang: what one is, and how SGLang's registry gets them."""
