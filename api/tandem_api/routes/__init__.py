"""One router for each area."""
