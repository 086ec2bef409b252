"""Whether a statistics file fits a model, judged by its config.json alone: before the model's weights are loaded.

`stats.file.check_stats` compares the rest with the loaded model.
"""

from __future__ import annotations

from pathlib import Path

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.fields import Fields
from sglang_triattn.model.fingerprint import model_fingerprint
from sglang_triattn.model.layout import read_layout
from sglang_triattn.stats.file import require_same
from sglang_triattn.stats.query_stats import QueryStats


def check_against_config(stats: QueryStats, content: Fields, folder: Path | None) -> None:
    """Compares statistics with the content of a config.json, and with the weights in its folder, if there are some.

    Args:
        folder: of the model; None if it is not on this machine.

    Raises:
        StatsError: naming the first field that differs and both values.
    """
    if folder is not None and any(folder.glob("*.safetensors")):
        require_same(stats, "model fingerprint", stats.fingerprint, model_fingerprint(str(folder)))
    try:
        layout = read_layout(content)
    except TriAttentionError:
        # A file that says too little; the loaded model says more.
        return
    if not layout.scored:
        return
    layer = layout.layers[layout.scored[0]]
    require_same(stats, "layers", len(stats.layers), len(layout.scored))
    require_same(stats, "query heads", stats.mean.shape[1], layer.q_heads)
    require_same(stats, "KV heads", stats.num_kv_heads, layer.kv_heads)
    require_same(stats, "head_dim", stats.head_dim, layer.head_dim)
