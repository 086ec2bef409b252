"""SGLang on machines without an accelerator."""
