"""The images that an attempt's pods ran, as their nodes said: part of parity in a cluster.

Attempts that were stored before keep NULL, as runs outside a cluster do: nothing was to be compared.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("images", JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "images")
