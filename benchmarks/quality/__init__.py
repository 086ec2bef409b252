"""What a model still knows of a text whose KV cache was compressed, and which tokens to keep."""
