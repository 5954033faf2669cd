#!/usr/bin/env bash
# Recompiles the locks (needs uv). The files are universal, hash-pinned and name no download address.
set -euo pipefail
cd "$(dirname "$0")/.."
compile=(uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header
  --no-emit-index-url --no-emit-find-links --python-version 3.11)
"${compile[@]}" "$@" --extra worker -o requirements/runtime.txt pyproject.toml
"${compile[@]}" "$@" --extra worker --group dev -o requirements/dev.txt pyproject.toml
"${compile[@]}" "$@" -c requirements/dev.txt -o requirements/build.txt requirements/build.in
"${compile[@]}" "$@" -c requirements/dev.txt -o requirements/oracle.txt requirements/oracle.in
"${compile[@]}" --no-deps "$@" -c requirements/dev.txt -o requirements/real-inputs.txt requirements/real-inputs.in
