"""Fleet: which nodes corrupt, how much has been looked at, and why runs said nothing."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.dashboards.parts import COUNT, PROMETHEUS, SECONDS, SHARE, choice, graph, label_values, listed, new, number
from deploy.dashboards.parts import source as data_source

REAL = 'synthetic=~"$synthetic"'


def fleet() -> dashboard.Dashboard:
    """The dashboard."""
    board = new(
        "Tandem / Fleet", "tandem-fleet", "Verdicts of nodes, mismatch rates, coverage, and inconclusive runs.",
        since="now-24h", refresh="1m",
    )  # fmt: skip
    board = board.with_variable(data_source("datasource", "prometheus", "Prometheus")).with_variable(
        choice(
            "synthetic", "Injected faults", label_values("tandem_pair_steps_total", "synthetic"), PROMETHEUS
        )
    )  # fmt: skip
    board = board.with_row(dashboard.Row("Nodes"))
    for verdict, about in (
        ("corrupting", "Nodes whose corruption was reproduced under control, or that differ from themselves."),
        ("suspected", "Nodes with a finding that is not reproduced yet."),
        ("clean", "Nodes compared long enough without a difference."),
        ("unknown", "Nodes of which too little is known."),
    ):
        query = f'max(tandem_fleet_nodes{{verdict="{verdict}"}})'
        board = board.with_panel(number(verdict.capitalize(), about, COUNT, query))
    board = (
        board.with_panel(
            number(
                "Coverage", "Share of the known nodes that are clean or corrupting: something is known of them.", SHARE,
                'sum(max by (verdict) (tandem_fleet_nodes{verdict=~"clean|corrupting"})) '
                "/ sum(max by (verdict) (tandem_fleet_nodes))",
            )
        )
        .with_panel(
            number(
                "Device time", "Compared in conclusive runs that began in the last 24 h.", SECONDS,
                "max(tandem_fleet_day_device_seconds)",
            )
        )
        .with_panel(
            listed(
                "Corrupting and suspected nodes", "Until they are cleared; the node's page says what was found.",
                "max by (node, verdict) (tandem_fleet_node_verdict)",
            )
        )
        .with_panel(
            graph(
                "Verdicts", "Nodes that a real run names, by verdict.", COUNT,
                ("max by (verdict) (tandem_fleet_nodes)", "{{verdict}}"),
            )
        )
        .with_row(dashboard.Row("Live pairs"))
        .with_panel(
            graph(
                "Mismatch rate by node", "Elements that differed for each one compared, of the node under test.", SHARE,
                (
                    f"sum by (node) (rate(tandem_pair_elements_mismatched_total{{{REAL}}}[$__rate_interval])) "
                    f"/ sum by (node) (rate(tandem_pair_elements_compared_total{{{REAL}}}[$__rate_interval]))",
                    "{{node}}",
                ),
            )
        )
        .with_panel(
            graph(
                "Mismatching tensors by phase and module", "Of all live pairs, per second.", "ops",
                (
                    f"sum by (phase, module) (rate(tandem_pair_sites_mismatched_total{{{REAL}}}[$__rate_interval]))",
                    "{{phase}}/{{module}}",
                ),
            )
        )
        .with_row(dashboard.Row("Runs"))
        .with_panel(
            graph(
                "Runs without a verdict yet", "Real runs, by workload.", COUNT,
                ("max by (workload) (tandem_fleet_live_runs)", "{{workload}}"), width=8,
            )
        )
        .with_panel(
            graph(
                "Runs of the last 24 h", "By verdict.", COUNT,
                ("sum by (verdict) (max by (workload, verdict) (tandem_fleet_day_runs))", "{{verdict}}"), width=8,
            )
        )
        .with_panel(
            graph(
                "Why runs were inconclusive", "Of the last 24 h.", COUNT,
                ("max by (reason) (tandem_fleet_day_inconclusive_runs)", "{{reason}}"), width=8,
            )
        )
    )  # fmt: skip
    return board.with_panel(
        number("Nodes with a conclusive run", "In the last 24 h.", COUNT, "max(tandem_fleet_day_tested_nodes)")
    ).with_panel(number("Database", "Whether the API reaches PostgreSQL.", COUNT, "min(tandem_api_database_up)"))
