"""Alembic migrations of the Tandem database."""
