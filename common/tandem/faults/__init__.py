"""Fault profiles: what is injected into synthetic runs, where it acts, and which are shipped."""
