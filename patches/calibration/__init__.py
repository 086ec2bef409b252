"""Calibration inside SGLang: the model runs as it is served."""
