"""Calibration inside SGLang, with the model running as it is served."""
