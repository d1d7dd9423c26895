#!/bin/sh
# Rewrites the lock files from pyproject.toml. Needs uv (pip install uv).
set -eu
cd "$(dirname "$0")/.."
lock() {
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
    --no-header -c requirements/constraints.txt --custom-compile-command requirements/compile.sh "$@"
}
lock pyproject.toml --extra hf --extra gguf --extra gcs -o requirements/run.lock
lock pyproject.toml --extra hf --extra gguf --extra cloud --extra gke --extra kaggle --group dev -c requirements/run.lock -o requirements/test.lock
# For the hosts of a slice; part of the package, since `lmwright launch` carries it there.
uv pip compile --quiet --python-platform x86_64-manylinux_2_31 --python-version 3.12 \
  --generate-hashes --no-emit-index-url --no-header --no-annotate -c requirements/constraints.txt \
  --custom-compile-command requirements/compile.sh \
  pyproject.toml --extra hf --extra gguf --extra cloud --extra tpu -o src/lmwright/cloud/hosts.lock
