# Sourced by run and test: makes .venv when it is missing or stale. $1 is the extra to install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make_environment() {
  local extra="$1" stamp=".venv/.installed-${1:-main}" wanted
  wanted="$(cat pyproject.toml constraints.txt requirements-lm.txt scripts/common.sh dlmi/version.py | cksum)"
  if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  local python="${PYTHON:-python3}"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "dlmi needs Python 3.11 or newer; name one with PYTHON=/path/to/python" >&2
    exit 2
  fi
  echo "Setting up .venv (once; a few minutes) ..." >&2
  [ -x .venv/bin/python ] || "$python" -m venv --clear .venv
  .venv/bin/python -m pip install -qq --upgrade "pip>=24" --constraint constraints.txt
  # First torch alone: the constraint picks a build that is already at hand where there is one.
  .venv/bin/python -m pip install -qq --constraint constraints.txt torch
  .venv/bin/python -m pip install -qq --constraint constraints.txt --editable ".${extra:+[$extra]}"
  .venv/bin/python -m pip install -qq --no-deps --require-hashes --requirement requirements-lm.txt
  echo "$wanted" >"$stamp"
}
