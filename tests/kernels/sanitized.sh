#!/usr/bin/env bash
# The tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make test-sanitized`.
# Builds the package once more, in build/sanitized, with this CPU's best instruction set and the scalar kernels, whose
# every access is checked (what masked instructions read and write is not). The installed kernels stay as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv/bin/python}
lib=$PWD/build/sanitized/lib

preload=()
for library in libasan.so libubsan.so libstdc++.so; do
  found=$("${CC:-gcc}" -print-file-name="$library" 2>/dev/null || true)
  if [[ $found != /* ]]; then # a compiler that does not know it says the bare name
    echo "test-sanitized: SKIPPED, NOTHING WAS TESTED: ${CC:-gcc} has no $library here" >&2
    exit 0
  fi
  preload+=("$found")
done

sets=$("$python" -c 'from kernels.cpu import native; print((native.instruction_sets() or ["scalar"])[0])'),scalar
echo "== building $sets with sanitizers"
log=$lib/../build.log
mkdir -p "$lib"
TANDEM_SANITIZE=address,undefined TANDEM_INSTRUCTION_SETS=$sets \
  "$python" setup.py -q build --build-lib "$lib" --build-temp "$lib/../temp" >"$log" 2>&1 || { cat "$log"; exit 1; }

export LD_PRELOAD="${preload[*]}" PYTHONPATH=$lib OMP_NUM_THREADS=1
export ASAN_OPTIONS=detect_leaks=0 # Python's own, all of it
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
"$python" -P - "$lib" "$sets" <<'CHECK'
import sys

from kernels.cpu import _native

lib, sets = sys.argv[1:]
assert _native.__file__.startswith(lib), f"{_native.__file__} is not the build with sanitizers"
assert set(_native.instruction_sets()) == set(sets.split(",")), _native.instruction_sets()
CHECK
# -P: the checkout's own kernels, without sanitizers, must not come first. capture=sys: a report ends the process, and
# what pytest had caught of it would be lost.
exec "$python" -P -m pytest -q -m "not slow" --capture=sys -o pythonpath="$lib ." -p no:cacheprovider --timeout 900 tests/kernels "$@"
