"""Totals per attempt, for whoever asks how a run stands, and the fencing tokens of leaders.

Attempts that were stored before have no totals: their runs have ended, or are shown without counts until they do.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels = None
depends_on = None

COUNTS = ("steps", "sites", "elements", "mismatched_sites", "mismatched_elements", "other_findings")


def upgrade() -> None:
    op.create_table(
        "attempt_totals",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        *(sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False) for name in COUNTS),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("first_site", sa.Integer(), nullable=True),
        sa.Column("first_rank", sa.Integer(), nullable=True),
        sa.Column("first_place", sa.Text(), nullable=True),
        sa.Column("first_mismatched", sa.BigInteger(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_attempt_totals")),
    )
    op.create_table(
        "fences",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_fences")),
    )


def downgrade() -> None:
    op.drop_table("fences")
    op.drop_table("attempt_totals")
