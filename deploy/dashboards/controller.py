"""Controller: whether it leads and keeps up, and where PairRuns stand."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.dashboards.parts import COUNT, PER_S, PROMETHEUS, SECONDS, choice, graph, label_values, listed, new, number
from deploy.dashboards.parts import source as data_source

WHICH = 'namespace=~"$namespace"'


def controller() -> dashboard.Dashboard:
    """The dashboard."""
    board = new(
        "Tandem / Controller", "tandem-controller", "The controller, and the PairRuns that it serves.",
        since="now-6h", refresh="30s",
    )  # fmt: skip
    board = board.with_variable(data_source("datasource", "prometheus", "Prometheus")).with_variable(
        choice("namespace", "Namespace", label_values("tandem_controller_leading", "namespace"), PROMETHEUS)
    )
    return _work(_runs(_state(board)))


def _state(board: dashboard.Dashboard) -> dashboard.Dashboard:
    one = {
        "Leading": ("Replicas that lead: exactly one.", COUNT, f"sum(tandem_controller_leading{{{WHICH}}})"),
        "Database": ("Whether PostgreSQL answered last time.", COUNT, f"max(tandem_controller_database_up{{{WHICH}}})"),
        "Queue": ("Keys that wait for a worker.", COUNT, f"sum(tandem_controller_queue_depth{{{WHICH}}})"),
        "Waiting longest": (
            "Longest wait for a partner.", SECONDS,
            f'max(tandem_controller_oldest_run_seconds{{{WHICH}, state="waiting"}})',
        ),
        "Without progress": (
            "Longest time since a running PairRun got further.", SECONDS,
            f"max(tandem_controller_oldest_progress_seconds{{{WHICH}}})",
        ),
    }  # fmt: skip
    for title, (about, unit, expression) in one.items():
        board = board.with_panel(number(title, about, unit, expression))
    return board.with_panel(
        number("Version", "", COUNT, "count by (version) (tandem_build_info)", legend="{{version}}")
    )


def _runs(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("PairRuns"))
        .with_panel(
            graph(
                "By state", "PairRuns that are there.", COUNT,
                (f"sum by (state) (tandem_controller_runs{{{WHICH}}})", "{{state}}"),
            )
        )
        .with_panel(
            graph(
                "Longest in a state", "By state.", SECONDS,
                (f"max by (state) (tandem_controller_oldest_run_seconds{{{WHICH}}})", "{{state}}"),
            )
        )
        .with_panel(
            listed(
                "Without a partner", "Why, and how many.",
                f"sum by (reason) (tandem_controller_unpaired_runs{{{WHICH}}})", width=8,
            )
        )
        .with_panel(
            graph(
                "Verdicts", "PairRuns that got one, per hour.", COUNT,
                (
                    f"sum by (kind, verdict) (increase(tandem_controller_runs_finished_total{{{WHICH}}}[1h]))",
                    "{{kind}} {{verdict}}",
                ),
                width=8,
            )
        )
        .with_panel(
            graph(
                "Inconclusive", "Per hour, by reason.", COUNT,
                (
                    f"sum by (reason) (increase(tandem_controller_runs_inconclusive_total{{{WHICH}}}[1h]))",
                    "{{reason}}",
                ),
                width=8,
            )
        )
    )  # fmt: skip


def _work(board: dashboard.Dashboard) -> dashboard.Dashboard:
    buckets = f"sum by (le) (rate(tandem_controller_reconcile_seconds_bucket{{{WHICH}}}[$__rate_interval]))"

    def rate(name: str) -> str:
        return f"sum(rate(tandem_controller_{name}_total{{{WHICH}}}[$__rate_interval]))"

    return (
        board.with_row(dashboard.Row("Work"))
        .with_panel(
            graph(
                "Reconcile time", "Of one PairRun.", SECONDS,
                (f"histogram_quantile(0.5, {buckets})", "median"), (f"histogram_quantile(0.95, {buckets})", "95 %"),
            )
        )
        .with_panel(
            graph(
                "Writes and errors", "Per second.", PER_S, (rate("status_writes"), "status writes"),
                (rate("reconcile_errors"), "reconciles that failed"), (rate("watch_errors"), "watches that broke"),
            )
        )
    )  # fmt: skip
