"""The loaded model: what it is, private passes through it, and the device memory that scoring needs."""
