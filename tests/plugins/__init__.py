"""Pytest plugins of this suite."""
