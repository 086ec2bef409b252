"""What `sglang-triattn doctor` and the documents list: all hooks, and what the installed SGLang lacks of them."""
