"""The run report: one self-contained HTML page."""
