"""The loaded model: what it is, its statistics, and the device memory that scoring needs."""
