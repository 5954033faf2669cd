"""Run (live): one pair while it runs, from what its reference tells."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.dashboards.parts import (
    BYTES_PER_S,
    COUNT,
    PER_S,
    PROMETHEUS,
    SECONDS,
    SHARE,
    choice,
    graph,
    label_values,
    listed,
    new,
    number,
)
from deploy.dashboards.parts import source as data_source

WHICH = 'node=~"$node", workload=~"$workload"'
RATE = "[$__rate_interval]"


def _rate(metric: str) -> str:
    return f"rate(tandem_pair_{metric}{{{WHICH}}}{RATE})"


def run() -> dashboard.Dashboard:
    """The dashboard."""
    board = new(
        "Tandem / Run (live)", "tandem-run", "Pairs while they run; what is stored of a run is in its report.",
        since="now-1h", refresh="10s",
    )  # fmt: skip
    board = (
        board.with_variable(data_source("datasource", "prometheus", "Prometheus"))
        .with_variable(choice("node", "Node under test", label_values("tandem_pair_steps_total", "node"), PROMETHEUS))
        .with_variable(
            choice("workload", "Workload", label_values("tandem_pair_steps_total", "workload"), PROMETHEUS)
        )
    )  # fmt: skip
    return _trouble(_speed(_compared(_now(board))))


def _now(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_panel(number("Pairs", "That run now.", COUNT, f"count(tandem_pair_steps_total{{{WHICH}}})"))
        .with_panel(number("Steps", "Compared so far.", COUNT, f"sum(tandem_pair_steps_total{{{WHICH}}})"))
        .with_panel(
            number("Tensors compared", "Site x rank.", COUNT, f"sum(tandem_pair_sites_compared_total{{{WHICH}}})")
        )
        .with_panel(
            number(
                "Tensors mismatching", "Although their inputs were equal.", COUNT,
                f"sum(tandem_pair_sites_mismatched_total{{{WHICH}}})",
            )
        )
        .with_panel(
            number(
                "Last step", "Time since; gone before the first and after the last.", SECONDS,
                f"max(tandem_pair_last_step_age_seconds{{{WHICH}}})",
            )
        )
        .with_panel(
            number(
                "Doing", "What the reference does.", COUNT,
                f"sum by (activity) (tandem_pair_activity{{{WHICH}}} == 1)", legend="{{activity}}",
            )
        )
    )  # fmt: skip


def _compared(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Compared"))
        .with_panel(
            graph(
                "Mismatching tensors", "Per second, by phase and module.", PER_S,
                (f"sum by (phase, module) ({_rate('sites_mismatched_total')})", "{{phase}}/{{module}}"),
            )
        )
        .with_panel(
            graph(
                "Mismatch rate", "Elements that differed for each one compared.", SHARE,
                (
                    f"sum by (phase, module) ({_rate('elements_mismatched_total')}) "
                    f"/ sum by (phase, module) ({_rate('elements_compared_total')})",
                    "{{phase}}/{{module}}",
                ),
            )
        )
        .with_panel(
            graph(
                "Elements compared", "Per second, by phase.", PER_S,
                (f"sum by (phase) ({_rate('elements_compared_total')})", "{{phase}}"),
            )
        )
        .with_panel(
            graph(
                "Other findings", "Kept inputs that changed, digests that differ alone.", COUNT,
                (f"sum by (node) (tandem_pair_other_findings_total{{{WHICH}}})", "{{node}}"),
            )
        )
    )  # fmt: skip


def _speed(board: dashboard.Dashboard) -> dashboard.Dashboard:
    buckets = f"sum by (le) ({_rate('step_seconds_bucket')})"
    return (
        board.with_row(dashboard.Row("Speed"))
        .with_panel(
            graph(
                "Step time", "On the reference, waits included.", SECONDS,
                (f"histogram_quantile(0.5, {buckets})", "median"), (f"histogram_quantile(0.95, {buckets})", "95 %"),
                (f"sum({_rate('step_seconds_sum')}) / sum({_rate('step_seconds_count')})", "mean"), width=8,
            )
        )
        .with_panel(
            graph(
                "Busy", "Share of the steps' time in which the reference did not wait for its peer.", SHARE,
                (
                    f"sum by (node) ({_rate('busy_seconds_total')}) / sum by (node) ({_rate('step_seconds_sum')})",
                    "{{node}}",
                ),
                width=8,
            )
        )
        .with_panel(
            graph("Steps", "Per second.", PER_S, (f"sum by (node) ({_rate('steps_total')})", "{{node}}"), width=8)
        )
        .with_panel(
            graph(
                "Link", "Bytes per second, both ways; and what exchanging every tensor would move.", BYTES_PER_S,
                (f"sum({_rate('link_bytes_total')})", "moved"),
                (f"sum({_rate('full_exchange_bytes_total')})", "full exchange"),
            )
        )
        .with_panel(
            graph(
                "Window", "Unconfirmed sites of a step, at most, and the limit: mismatches shrink it.", COUNT,
                (f"max by (node) (tandem_pair_window_sites{{{WHICH}}})", "{{node}}"),
                (f"max by (node) (tandem_pair_window_limit_sites{{{WHICH}}})", "{{node}} limit"),
            )
        )
    )  # fmt: skip


def _trouble(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Records and controls"))
        .with_panel(
            graph(
                "Records", "Not yet in PostgreSQL; of them, in the spool because it does not answer.", COUNT,
                (f"sum by (node) (tandem_pair_records_waiting{{{WHICH}}})", "{{node}} waiting"),
                (f"sum by (node) (tandem_pair_spool_records{{{WHICH}}})", "{{node}} spooled"),
            )
        )
        .with_panel(
            listed(
                "Failed controls", "By side; a reference that fails one makes the run inconclusive.",
                f"sum by (node, reference, role, control) (tandem_pair_control_failures_total{{{WHICH}}})",
            )
        )
    )  # fmt: skip
