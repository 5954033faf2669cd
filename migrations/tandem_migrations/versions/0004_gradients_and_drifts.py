"""Gradient noise (RQ2) and drift (RQ3), partitioned as steps are, and their counts in the closing record.

The partitions of a month are made when its next run is inserted.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels = None
depends_on = None

COUNTS = ("gradients", "drifts", "evaluations")


def upgrade() -> None:
    for name in COUNTS:
        op.add_column("closings", sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.create_table(
        "gradients",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("leaf", sa.Text(), nullable=False),
        sa.Column("noise", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("signal", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("suspect", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("cosine", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("elements", sa.BigInteger(), nullable=False),
        sa.Column("mismatched", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", "leaf", name=op.f("pk_gradients")),
        postgresql_partition_by="RANGE (run_id)",
    )
    op.create_table(
        "drifts",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("drift", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("norm", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("error", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("loss", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("grad_norm", sa.DOUBLE_PRECISION(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", "arm", "part", "method", name=op.f("pk_drifts")),
        postgresql_partition_by="RANGE (run_id)",
    )


def downgrade() -> None:
    op.drop_table("drifts")
    op.drop_table("gradients")
    for name in reversed(COUNTS):
        op.drop_column("closings", name)
