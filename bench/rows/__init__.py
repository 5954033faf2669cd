"""The benches by name. Each runs in a process of its own and returns its rows."""

from __future__ import annotations

BENCHES = {
    "sync": "bench.rows.sync:clean",
    "delay": "bench.rows.sync:delayed",
    "corrupt": "bench.rows.sync:corrupting",
    "chain": "bench.rows.chain:measure",
    "gradient": "bench.rows.gradient:measure",
    "exchange": "bench.rows.exchange:measure",
    "training": "bench.rows.whole:training",
    "sketch": "bench.rows.sketch:measure",
    "records": "bench.rows.records:measure",
    "profile": "bench.rows.profile:measure",
    "visible": "bench.rows.visible:measure",
    "memory": "bench.rows.memory:measure",
    "metrics": "bench.rows.metrics:measure",
    "api_reads": "bench.rows.api_reads:measure",
    "api_events": "bench.rows.api_events:measure",
    "console": "bench.rows.console_page:measure",
    "controller": "bench.rows.controller:measure",
}
"""Name -> ``module:function``, called with `bench.options.Options`."""
