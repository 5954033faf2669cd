"""The first schema: runs, attempts, records, roll-ups, decisions.

Months of the partitioned tables are made when the first run of a month is created (``tandem.db.partitions``).

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0001"
down_revision: str | None = None
branch_labels = None
depends_on = None

TABLES = (
    "attempts",
    "closings",
    "controls",
    "evaluations",
    "faults",
    "mismatches",
    "node_decisions",
    "node_rollups",
    "rollup_ledger",
    "runs",
    "steps",
)

TRIGGERS = """
CREATE FUNCTION tandem_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% of table % is not allowed: %', TG_OP, TG_TABLE_NAME, TG_ARGV[0]
    USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER synthetic_is_for_ever BEFORE UPDATE ON runs FOR EACH ROW
  WHEN (OLD.synthetic IS DISTINCT FROM NEW.synthetic)
  EXECUTE FUNCTION tandem_refuse('a run is synthetic or real for ever');
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON node_decisions FOR EACH STATEMENT
  EXECUTE FUNCTION tandem_refuse('decisions are only appended');
"""


def upgrade() -> None:
    op.create_table(
        "closings",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("mismatches", sa.BigInteger(), nullable=False),
        sa.Column("mismatches_total", sa.BigInteger(), nullable=False),
        sa.Column("controls", sa.BigInteger(), nullable=False),
        sa.Column("faults", sa.BigInteger(), nullable=False),
        sa.Column("capped", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("device_seconds", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("devices", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_closings")),
    )
    op.create_table(
        "controls",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("ok", sa.Boolean(), nullable=False),
        sa.Column("repeats", sa.Integer(), nullable=False),
        sa.Column("detail", postgresql.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "name", "role", "step", "subject", name=op.f("pk_controls")),
    )
    op.create_table(
        "evaluations",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("scores", postgresql.ARRAY(sa.DOUBLE_PRECISION()), nullable=False),
        sa.Column("chosen", sa.Integer(), nullable=False),
        sa.Column("answer", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", "task", "question", "arm", name=op.f("pk_evaluations")),
        postgresql_partition_by="RANGE (run_id)",
    )
    op.create_table(
        "faults",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("site", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("changed", sa.BigInteger(), nullable=False),
        sa.Column("elements", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", "site", "rank", "level", name=op.f("pk_faults")),
        postgresql_partition_by="RANGE (run_id)",
    )
    op.create_table(
        "mismatches",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("site", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("tensor", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("module", sa.Text(), nullable=False),
        sa.Column("layer", sa.Integer(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("elements", sa.BigInteger(), nullable=False),
        sa.Column("mismatched", sa.BigInteger(), nullable=True),
        sa.Column("severity_mean", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("severity_median", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("severity_max", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("zero_reference", sa.BigInteger(), nullable=True),
        sa.Column("nonfinite", sa.BigInteger(), nullable=True),
        sa.Column("nullified", sa.BigInteger(), nullable=True),
        sa.Column("bits", postgresql.ARRAY(sa.BigInteger()), nullable=True),
        sa.Column("first_index", sa.BigInteger(), nullable=True),
        sa.Column("extent", sa.Text(), nullable=True),
        sa.Column("box", postgresql.JSONB(), nullable=True),
        sa.Column("replay", sa.Text(), nullable=False),
        sa.Column("replays", sa.Integer(), nullable=False),
        sa.Column("replays_right", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("detected_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", "site", "rank", "tensor", name=op.f("pk_mismatches")),
        postgresql_partition_by="RANGE (run_id)",
    )
    op.create_table(
        "node_decisions",
        sa.Column("decision_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("run_id", sa.UUID(), nullable=True),
        sa.PrimaryKeyConstraint("decision_id", name=op.f("pk_node_decisions")),
    )
    op.create_index(op.f("ix_node_decisions_node_decided_at"), "node_decisions", ["node", "decided_at"], unique=False)
    op.create_table(
        "node_rollups",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("site_class", sa.Text(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("sites", sa.BigInteger(), nullable=False),
        sa.Column("elements", sa.BigInteger(), nullable=False),
        sa.Column("mismatched_sites", sa.BigInteger(), nullable=False),
        sa.Column("mismatched_elements", sa.BigInteger(), nullable=False),
        sa.Column("device_seconds", sa.DOUBLE_PRECISION(), nullable=False),
        sa.PrimaryKeyConstraint("node", "workload", "kind", "site_class", name=op.f("pk_node_rollups")),
    )
    op.create_table(
        "rollup_ledger",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("sites", sa.BigInteger(), nullable=False),
        sa.Column("elements", sa.BigInteger(), nullable=False),
        sa.Column("mismatched_sites", sa.BigInteger(), nullable=False),
        sa.Column("mismatched_elements", sa.BigInteger(), nullable=False),
        sa.Column("device_seconds", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_rollup_ledger")),
    )
    op.create_index(op.f("ix_rollup_ledger_node"), "rollup_ledger", ["node"], unique=False)
    op.create_table(
        "runs",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("synthetic", sa.Boolean(), nullable=False),
        sa.Column("reference_node", sa.Text(), nullable=False),
        sa.Column("suspect_node", sa.Text(), nullable=False),
        sa.Column("spec", postgresql.JSONB(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), server_default=sa.text("''::text"), nullable=False),
        sa.Column("sentence", sa.Text(), server_default=sa.text("''::text"), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("supervisor", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("records_dropped_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'finished') = (verdict IS NOT NULL)", name=op.f("ck_runs_finished_has_verdict")),
        sa.CheckConstraint("state IN ('running', 'finished')", name=op.f("ck_runs_state")),
        sa.CheckConstraint("verdict IN ('match', 'mismatch', 'inconclusive')", name=op.f("ck_runs_verdict")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_reference_node_run_id"), "runs", ["reference_node", "run_id"], unique=False)
    op.create_index(op.f("ix_runs_suspect_node_run_id"), "runs", ["suspect_node", "run_id"], unique=False)
    op.create_table(
        "steps",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("classes", postgresql.JSONB(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("loss_reference", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("loss_suspect", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("grad_norm_reference", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("grad_norm_suspect", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("duration_s", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("busy_s", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("link_bytes", sa.BigInteger(), nullable=False),
        sa.Column("full_bytes", sa.BigInteger(), nullable=False),
        sa.Column("window_max", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sync", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", name=op.f("pk_steps")),
        postgresql_partition_by="RANGE (run_id)",
    )
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.Text(), server_default=sa.text("''::text"), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=True),
        sa.Column("parity", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("reference_host", sa.Text(), server_default=sa.text("''::text"), nullable=False),
        sa.Column("suspect_host", sa.Text(), server_default=sa.text("''::text"), nullable=False),
        sa.Column("devices", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.CheckConstraint("state IN ('running', 'closed', 'orphaned')", name=op.f("ck_attempts_state")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_attempts_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_attempts")),
    )
    op.create_index(
        "ix_attempts_running", "attempts", ["run_id"], unique=False, postgresql_where=sa.text("state = 'running'")
    )
    op.execute(TRIGGERS)


def downgrade() -> None:
    for table in TABLES:
        op.drop_table(table)
    op.execute("DROP FUNCTION tandem_refuse()")
