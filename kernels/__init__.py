"""Scoring and selection: one kernel a file, each beside its naive torch twin.

A twin (`*_naive`) is the definition of what its kernel computes, runs on any device torch runs on, and never
makes the host wait for the device. Nothing here knows about SGLang, statistics files or calibration.
"""
