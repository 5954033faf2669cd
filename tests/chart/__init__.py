"""Tests of the Helm chart: what it renders, and that a real API server takes it."""
