#!/bin/sh
# Every check of this project that needs a GPU, and a table of how they ended; see README.md beside this file.
#
#     benchmarks/gpu_check.sh                    # on a machine without CUDA: what would run
#     benchmarks/gpu_check.sh --only parity      # those whose name has this in it
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
command -v "$python" >/dev/null 2>&1 || python=python3
exec "$python" "$here/gpu_check.py" "$@"
