"""Tests against real Kubernetes parts, and the tool that boots them."""
