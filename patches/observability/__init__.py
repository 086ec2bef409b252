"""Proof of activity and of integrity: logs, metrics, responses, the census."""
