"""Node: what PostgreSQL holds of one node, over time. The verdict is computed (`tandem node NAME`), not stored."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.dashboards.parts import COUNT, POSTGRES, SHARE, choice, new, sql_number, sql_points, sql_rows
from deploy.dashboards.parts import source as data_source

MINE = "r.suspect_node = ${node:sqlstring} AND NOT r.synthetic AND $__timeFilter(r.created_at)"
PROFILES = f"FROM runs r JOIN run_profiles p USING (run_id) WHERE {MINE}"
"""Runs that say something of the node: of two hosts, without injected faults."""
NODES = "SELECT DISTINCT suspect_node FROM runs WHERE NOT synthetic ORDER BY 1"


def node() -> dashboard.Dashboard:
    """The dashboard."""
    board = new(
        "Tandem / Node", "tandem-node",
        "The profile of one node over time, from the records; its verdict is on the node's page and in `tandem node`.",
        since="now-90d", refresh="5m",
    )  # fmt: skip
    board = board.with_variable(
        data_source("postgres", "grafana-postgresql-datasource", "PostgreSQL")
    ).with_variable(choice("node", "Node", NODES, POSTGRES, every=False))  # fmt: skip
    return _detail(_over_time(_sums(board)))


def _sums(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_panel(
            sql_number("Runs", "With the node under test.", COUNT, f"SELECT count(*) FROM runs r WHERE {MINE}")
        )
        .with_panel(
            sql_number(
                "Mismatching runs", "With the verdict mismatch.", COUNT,
                f"SELECT count(*) FROM runs r WHERE {MINE} AND r.verdict = 'mismatch'",
            )
        )
        .with_panel(
            sql_number(
                "Device-hours", "Compared in conclusive attempts.", "h",
                f"SELECT coalesce(sum(p.device_seconds), 0) / 3600 {PROFILES}",
            )
        )
        .with_panel(sql_number("Steps", "Compared.", COUNT, f"SELECT coalesce(sum(p.steps), 0)::float8 {PROFILES}"))
        .with_panel(
            sql_number("Elements", "Compared.", COUNT, f"SELECT coalesce(sum(p.elements), 0)::float8 {PROFILES}")
        )
        .with_panel(
            sql_number(
                "Elements mismatching", "", COUNT, f"SELECT coalesce(sum(p.mismatched_elements), 0)::float8 {PROFILES}"
            )
        )
    )  # fmt: skip


def _over_time(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Over time"))
        .with_panel(
            sql_points(
                "Mismatch rate", "Elements that differed for each one compared; a point is a run.", SHARE,
                'SELECT r.created_at AS "time", r.workload AS metric, '
                f"p.mismatched_elements::float8 / nullif(p.elements, 0) AS value {PROFILES} ORDER BY 1",
            )
        )
        .with_panel(
            sql_points(
                "Steps with a mismatch", "Share of a run's steps.", SHARE,
                'SELECT r.created_at AS "time", r.workload AS metric, '
                f"p.affected_steps::float8 / nullif(p.steps, 0) AS value {PROFILES} ORDER BY 1",
            )
        )
        .with_panel(
            sql_points(
                "Device-hours a day", "By workload.", "h",
                "SELECT $__timeGroup(r.created_at, '1d') AS \"time\", r.workload AS metric, "
                f"sum(p.device_seconds) / 3600 AS value {PROFILES} GROUP BY 1, 2 ORDER BY 1",
                bars=True,
            )
        )
        .with_panel(
            sql_points(
                "Verdicts a day", "Runs by verdict.", COUNT,
                "SELECT $__timeGroup(r.created_at, '1d') AS \"time\", coalesce(r.verdict, 'running') AS metric, "
                f"count(*) AS value FROM runs r WHERE {MINE} GROUP BY 1, 2 ORDER BY 1",
                bars=True,
            )
        )
    )  # fmt: skip


def _detail(board: dashboard.Dashboard) -> dashboard.Dashboard:
    rows = f"FROM mismatches m JOIN runs r USING (run_id) WHERE {MINE} AND m.cause = 'compute'"
    return (
        board.with_row(dashboard.Row("What differed"))
        .with_panel(
            sql_rows(
                "By phase and module", "Stored mismatches; of a run whose rows are capped, the first.",
                "SELECT m.phase, m.module, count(*) AS tensors, sum(m.mismatched)::float8 AS elements, "
                f"max(m.severity_max) AS severity_max {rows} GROUP BY 1, 2 ORDER BY 3 DESC",
                width=12,
            )
        )
        .with_panel(
            sql_rows(
                "By replay and extent", "Whether it came back, and the shape of the damage.",
                f"SELECT m.replay, m.extent, count(*) AS tensors {rows} GROUP BY 1, 2 ORDER BY 3 DESC",
                width=12,
            )
        )
        .with_panel(
            sql_rows(
                "Runs", "The newest first.",
                'SELECT r.created_at AS "time", r.run_id::text AS run, r.workload, r.kind, '
                "r.reference_node AS reference, coalesce(r.verdict, 'running') AS verdict, r.reason, "
                "p.evidence, p.steps, p.mismatched_elements, p.device_seconds / 3600 AS device_hours "
                "FROM runs r LEFT JOIN run_profiles p USING (run_id) "
                f"WHERE {MINE} ORDER BY r.run_id DESC LIMIT 200",
            )
        )
        .with_panel(
            sql_rows(
                "As a reference", "Runs in which it was the reference and did not repeat its own results.",
                'SELECT r.created_at AS "time", r.run_id::text AS run, r.workload, r.suspect_node AS suspect '
                "FROM runs r JOIN run_profiles p USING (run_id) WHERE r.reference_node = ${node:sqlstring} "
                "AND p.reference_differs AND $__timeFilter(r.created_at) ORDER BY r.run_id DESC LIMIT 200",
                width=12,
            )
        )
        .with_panel(
            sql_rows(
                "Decisions", "Of people; what was found before a node was cleared counts no more.",
                'SELECT decided_at AS "time", decision, reason, decided_by FROM node_decisions '
                "WHERE node = ${node:sqlstring} AND $__timeFilter(decided_at) ORDER BY decided_at DESC LIMIT 200",
                width=12,
            )
        )
    )  # fmt: skip
