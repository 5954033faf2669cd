"""Benchmarks: every promise about speed, traffic and memory as a measurement that can be run again.

``python -m bench [name ...]`` measures and writes ``bench/results.json``; ``python -m bench --page`` makes
``docs/bench.md`` from it.
"""
