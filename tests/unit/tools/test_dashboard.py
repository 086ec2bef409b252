"""The dashboard, as far as it can be judged without Grafana; tests/server/test_metrics.py evaluates its queries."""

from __future__ import annotations

import itertools
import json
import re

import yaml

from prometheus import CONFIG, DASHBOARD, panels
from sglang_triattn.patches.observability import metrics

CONTENT = json.loads(DASHBOARD.read_text())
EXPRESSIONS = [target["expr"] for panel in panels() for target in panel["targets"]]


def test_panels_do_not_collide():
    """Prevents panels that lie on one another, and ids that Grafana replaces."""
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, rows = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        cells = set(itertools.product(columns, rows))
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(taken) == 24 * max(row + 1 for _, row in taken), "a gap between panels"


def test_every_query_can_be_pointed_elsewhere():
    """Prevents a dashboard that works with one data source, or mixes models and servers."""
    assert [variable["name"] for variable in CONTENT["templating"]["list"]] == ["datasource", "model_name", "instance"]
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["datasource"] == source
        assert panel["title"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])
        assert all(target["datasource"] == source for target in panel["targets"])
    for expression in EXPRESSIONS:
        selectors = re.findall(r"sglang:\w+(\{[^}]*\})?", expression)
        assert selectors
        assert all('model_name=~"$model_name", instance=~"$instance"' in found for found in selectors), expression


def test_every_metric_is_shown():
    """Prevents a panel of a metric that does not exist, and a metric without a panel."""
    named = {name for expression in EXPRESSIONS for name in re.findall(r"sglang:triattention_\w+", expression)}
    plain = {metrics.PREFIX + name for name in (*metrics.COUNTERS, metrics.REFUSED, *metrics.GAUGES, metrics.STOPPED)}
    histograms = {metrics.PREFIX + name for name in metrics.HISTOGRAMS}
    known = plain | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert named <= known
    assert plain <= named
    assert {f"{name}_bucket" for name in histograms} <= named


def test_the_parts_fit_together():
    """Prevents a data source that reads another Prometheus than the one that is configured."""
    folder = DASHBOARD.parents[2]
    (source,) = yaml.safe_load((folder / "datasources" / "datasource.yaml").read_text())["datasources"]
    current = CONTENT["templating"]["list"][0]["current"]
    assert current == {"text": source["name"], "value": source["uid"]}
    config = yaml.safe_load(CONFIG.read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "config" / "dashboard.yaml").read_text())["providers"]
    assert provider["options"]["path"]
