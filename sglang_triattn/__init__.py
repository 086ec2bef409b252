"""TriAttention KV-cache compression for SGLang, with radix-tree prefix sharing left on."""

__version__ = "0.1.0"
