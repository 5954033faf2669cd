"""What each run adds to its node's profile, written with its verdict; totals of attempts from before migration 0002.

The roll-ups of 0001 counted rows as they came, whatever the run's verdict became, so that no profile could rest on
them: they go. Runs that are there are summarised at the end of the upgrade.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels = None
depends_on = None

COUNTS = ("steps", "affected_steps", "sites", "elements", "mismatched_sites", "mismatched_elements")
OLD_COUNTS = ("steps", "sites", "elements", "mismatched_sites", "mismatched_elements")

BACKFILL = """
LOCK TABLE attempt_totals IN SHARE ROW EXCLUSIVE MODE;
WITH lacking AS (
  SELECT s.run_id, s.attempt FROM steps s LEFT JOIN attempt_totals t USING (run_id, attempt)
  GROUP BY s.run_id, s.attempt, t.steps HAVING t.steps IS NULL OR t.steps < count(*)
), per_step AS (
  SELECT s.run_id, s.attempt, s.step, s.rows,
         coalesce(sum((c.value->>0)::bigint), 0) AS sites, coalesce(sum((c.value->>1)::bigint), 0) AS elements,
         coalesce(sum((c.value->>2)::bigint), 0) AS mismatched_sites,
         coalesce(sum((c.value->>3)::bigint), 0) AS mismatched_elements
  FROM steps s JOIN lacking USING (run_id, attempt) LEFT JOIN LATERAL jsonb_each(s.classes) c ON true
  GROUP BY s.run_id, s.attempt, s.step, s.rows
), firsts AS (
  SELECT DISTINCT ON (m.run_id, m.attempt) m.*
  FROM mismatches m JOIN lacking USING (run_id, attempt)
  ORDER BY m.run_id, m.attempt, m.step, m.site, m.rank, m.tensor
)
INSERT INTO attempt_totals AS t (run_id, attempt, last_step, steps, sites, elements, mismatched_sites,
  mismatched_elements, other_findings, first_step, first_site, first_rank, first_place, first_mismatched)
SELECT p.run_id, p.attempt, max(p.step), count(*), sum(p.sites), sum(p.elements), sum(p.mismatched_sites),
       sum(p.mismatched_elements), sum(p.rows - p.mismatched_sites), f.step, f.site, f.rank,
       f.phase || '/' || f.module || CASE WHEN f.layer < 0 THEN '' ELSE ' layer ' || f.layer END || ' ' || f.tensor,
       f.mismatched
FROM per_step p LEFT JOIN firsts f USING (run_id, attempt)
GROUP BY p.run_id, p.attempt, f.step, f.site, f.rank, f.phase, f.module, f.layer, f.tensor, f.mismatched
ON CONFLICT (run_id, attempt) DO UPDATE SET
  last_step = EXCLUDED.last_step, steps = EXCLUDED.steps, sites = EXCLUDED.sites, elements = EXCLUDED.elements,
  mismatched_sites = EXCLUDED.mismatched_sites, mismatched_elements = EXCLUDED.mismatched_elements,
  other_findings = EXCLUDED.other_findings, first_step = EXCLUDED.first_step, first_site = EXCLUDED.first_site,
  first_rank = EXCLUDED.first_rank, first_place = EXCLUDED.first_place, first_mismatched = EXCLUDED.first_mismatched,
  updated_at = now()
"""
"""Of attempts whose totals are not there, or lack the steps of their first part."""


def upgrade() -> None:
    op.create_table(
        "run_profiles",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("executables", sa.Text(), nullable=False),
        *(
            sa.Column(name, sa.Boolean(), nullable=False)
            for name in ("passed_null", "comparable", "reference_differs", "suspect_differs")
        ),
        sa.Column("findings", sa.BigInteger(), nullable=False),
        sa.Column("attempts", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        sa.Column("device_seconds", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("devices", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("device_count", sa.Integer(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("detail", postgresql.JSON(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_run_profiles_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_profiles")),
    )
    op.create_index(
        "ix_run_profiles_passed_null", "run_profiles", ["executables"], postgresql_where=sa.text("passed_null")
    )
    op.create_index(
        "ix_run_profiles_unsteady", "run_profiles", ["run_id"],
        postgresql_where=sa.text("reference_differs OR suspect_differs"),
    )  # fmt: skip
    for statement in BACKFILL.split(";"):
        op.execute(statement)
    op.drop_table("node_rollups")
    op.drop_table("rollup_ledger")


def downgrade() -> None:
    counts = [sa.Column(name, sa.BigInteger(), nullable=False) for name in OLD_COUNTS]
    op.create_table(
        "node_rollups",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("node", "workload", "kind", "site_class")),
        *counts,
        sa.Column("device_seconds", sa.DOUBLE_PRECISION(), nullable=False),
        sa.PrimaryKeyConstraint("node", "workload", "kind", "site_class", name=op.f("pk_node_rollups")),
    )
    op.create_table(
        "rollup_ledger",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in OLD_COUNTS),
        sa.Column("device_seconds", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_rollup_ledger")),
    )
    op.create_index(op.f("ix_rollup_ledger_node"), "rollup_ledger", ["node"], unique=False)
    op.drop_table("run_profiles")
