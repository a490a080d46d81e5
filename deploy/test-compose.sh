#!/bin/bash
# `make test-compose`: builds the images, and runs compose.yaml for real (tests/deploy/live_compose.py).
#
# Takes the engine that `docker info` finds, or brings one up where we are root on Debian, and stops that one again. Where
# none is to be had it says so and passes. TANDEM_BASE_IMAGE: a base image; default: python:3.11-slim, or a stand-in for
# it where no image registry answers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
stand_in=tandem-python-stand-in
staged=()
own_engine=

main() {
    trap clean_up EXIT
    find_engine
    find_base_image
    stage_wheels
    timeout --kill-after 60 1800 "$python" -m pytest -q --timeout 840 tests/deploy/live_compose.py "$@"
}

find_engine() {
    has_engine && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        skip "no Docker engine with Compose answers, and only root on Debian can bring one up here"
    . <(deploy/engine.sh env)
    has_engine && return
    own_engine=1
    echo "== bringing up a Docker engine"
    timeout 300 deploy/engine.sh up || skip "deploy/engine.sh could not bring one up (its message is above)"
}

has_engine() { timeout 20 docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; }

find_base_image() {
    local official=python:3.11-slim
    [ -z "${TANDEM_BASE_IMAGE:-}" ] || return 0
    export TANDEM_BASE_IMAGE=$official
    docker image inspect "$official" >/dev/null 2>&1 || timeout 120 docker pull --quiet "$official" && return
    echo "== no image registry answers: making a stand-in for $official"
    timeout 400 deploy/base-image.sh "$stand_in" || skip "deploy/base-image.sh could not make one"
    TANDEM_BASE_IMAGE=$stand_in
}

# A folder of wheels that pip is set up to look into cannot be seen by a build; one with a torch is lent to it.
stage_wheels() {
    local folder wheel
    folder=$("$python" -m pip config get global.find-links 2>/dev/null || true)
    compgen -G 'deploy/wheels/torch-*.whl' >/dev/null && return
    for wheel in "$folder"/torch-*.whl; do
        [ -e "$wheel" ] || continue
        cp "$wheel" deploy/wheels/
        staged+=("deploy/wheels/${wheel##*/}")
    done
}

clean_up() {
    [ ${#staged[@]} = 0 ] || rm -f "${staged[@]}"
    docker image prune --force --filter label=org.opencontainers.image.title=tandem >/dev/null 2>&1 || true
    [ -z "$own_engine" ] || deploy/engine.sh down
}

skip() {
    printf '\n%s\n' "!!! SKIPPED: compose.yaml was NOT tested" "!!! $1" "" >&2
    exit 0
}

main "$@"
