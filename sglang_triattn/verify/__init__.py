"""`sglang-triattn verify`: does a live server compress, and is what it serves still right? Over HTTP alone."""
