"""What a model's config.json and modules say: sizes, RoPE, identity, and whether it can be compressed."""
