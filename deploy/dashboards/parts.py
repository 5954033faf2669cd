"""What the dashboards are built of: panels with their queries, and variables for the data sources."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog import builder, variants
from grafana_foundation_sdk.models.common import GraphDrawStyle
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PROMETHEUS = DataSourceRef("prometheus", "${datasource}")
POSTGRES = DataSourceRef("grafana-postgresql-datasource", "${postgres}")
SQL_TABLE, SQL_SERIES = "table", "time_series"
COUNT, SHARE, SECONDS, BYTES_PER_S, PER_S = "short", "percentunit", "s", "Bps", "ops"
HEIGHT = 8

Panel = timeseries.Panel | stat.Panel | table.Panel


class _Sql(variants.Dataquery):
    """A query of Grafana's PostgreSQL data source, for which the SDK has no type."""

    def __init__(self, sql: str, form: str) -> None:
        self.ref_id: str | None = "A"
        self.hide: bool | None = None
        self.sql, self.form = sql, form

    def to_json(self) -> dict[str, Any]:
        return {
            "refId": self.ref_id, "datasource": POSTGRES, "rawQuery": True, "editorMode": "code", "format": self.form,
            "rawSql": self.sql,
        }  # fmt: skip


class _SqlQuery(builder.Builder[variants.Dataquery]):
    def __init__(self, sql: str, form: str) -> None:
        self._query = _Sql(sql, form)

    def build(self) -> variants.Dataquery:
        return self._query


def new(title: str, uid: str, about: str, *, since: str, refresh: str) -> dashboard.Dashboard:
    """An empty dashboard."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["tandem"])
        .time(since, "now")
        .refresh(refresh)
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(
            dashboard.DashboardLink("Tandem").tags(["tandem"]).as_dropdown(True).include_vars(True).keep_time(True)
        )
    )  # fmt: skip


def source(name: str, kind: str, label: str) -> dashboard.DatasourceVariable:
    """A variable that says which data source of a kind is asked."""
    return dashboard.DatasourceVariable(name).type(kind).label(label)


def choice(name: str, label: str, query: str | dict[str, object], ref: DataSourceRef, *, every: bool = True) -> Any:
    """A variable with the values that a data source has; ``every``: also all of them."""
    made = (
        dashboard.QueryVariable(name).label(label).query(query).datasource(ref)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    )  # fmt: skip
    return made.multi(True).include_all(True).all_value(".*") if every else made


def label_values(metric: str, label: str) -> dict[str, object]:
    """A variable's query for the values of a label."""
    return {"query": f"label_values({metric}, {label})", "refId": "variable"}


def graph(title: str, about: str, unit: str, *queries: tuple[str, str], width: int = 12) -> timeseries.Panel:
    """Lines over time; each query is an expression and its legend."""
    panel = timeseries.Panel().title(title).description(about).unit(unit).datasource(PROMETHEUS).min(0)
    panel = panel.span(width).height(HEIGHT).fill_opacity(10)
    for number, (expression, legend) in enumerate(queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).range().ref_id(chr(ord("A") + number))
        panel = panel.with_target(query)
    return panel


def number(title: str, about: str, unit: str, expression: str, *, legend: str = "", width: int = 4) -> stat.Panel:
    """One number, or one for each series."""
    query = prometheus.Dataquery().expr(expression).legend_format(legend).instant().ref_id("A")
    panel = stat.Panel().title(title).description(about).unit(unit).datasource(PROMETHEUS)
    return panel.span(width).height(HEIGHT // 2).with_target(query)


def listed(title: str, about: str, expression: str, *, width: int = 12) -> table.Panel:
    """The series as rows."""
    query = prometheus.Dataquery().expr(expression).instant().format(PromQueryFormat.TABLE).ref_id("A")
    panel = table.Panel().title(title).description(about).datasource(PROMETHEUS)
    return panel.span(width).height(HEIGHT).with_target(query)


def sql_rows(title: str, about: str, sql: str, *, width: int = 24) -> table.Panel:
    """Rows of a query."""
    panel = table.Panel().title(title).description(about).datasource(POSTGRES)
    return panel.span(width).height(HEIGHT).with_target(_SqlQuery(_clean(sql), SQL_TABLE))


def sql_number(title: str, about: str, unit: str, sql: str, *, width: int = 4) -> stat.Panel:
    """The one number that a query gives."""
    panel = stat.Panel().title(title).description(about).unit(unit).datasource(POSTGRES)
    return panel.span(width).height(HEIGHT // 2).with_target(_SqlQuery(_clean(sql), SQL_TABLE))


def sql_points(title: str, about: str, unit: str, sql: str, *, width: int = 12, bars: bool = False) -> timeseries.Panel:
    """Points over time: columns ``time``, ``metric`` (text) and ``value``."""
    panel = timeseries.Panel().title(title).description(about).unit(unit).datasource(POSTGRES).min(0)
    panel = panel.draw_style(GraphDrawStyle.BARS if bars else GraphDrawStyle.POINTS)
    return panel.span(width).height(HEIGHT).with_target(_SqlQuery(_clean(sql), SQL_SERIES))


def _clean(sql: str) -> str:
    return " ".join(sql.split())
