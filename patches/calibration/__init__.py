"""Statistics of the served model: found in a file or the cache, or measured as the model is served."""
