"""A small, real Kubernetes cluster on one Linux machine, for tests, without Docker; see README.md beside this file."""
