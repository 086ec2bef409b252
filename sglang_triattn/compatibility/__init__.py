"""Which models and settings of SGLang compression works with: the one judgement of `check`, `plan` and a launch.

`traits` reads what matters of a model from its config.json, `rules` are the tables of what is refused, and `resolve`
puts both together with a server's settings. `sglang_triattn.patches.launch.traits` reads the same traits from a model
that SGLang has read. What a single architecture needs stands in its row of `sglang_triattn.model.families`.
"""
