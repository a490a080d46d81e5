#!/bin/bash
# Makes a stand-in for python:3.11-slim where no image registry can be reached: Debian with its Python 3.11 as
# /usr/local/bin/python, pip, and this machine's CA certificates. Needs root and an engine; kept once it is made.
#
#   deploy/base-image.sh NAME    then: docker compose build --build-arg BASE_IMAGE=NAME
set -euo pipefail

image=$1
docker image inspect "$image" >/dev/null 2>&1 && exit 0
if ! command -v mmdebstrap >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null 2>&1
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# usr-is-merged and its hook: otherwise Debian brings all of Perl along to merge /usr
mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates,usr-is-merged \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='chroot "$1" python3 -m venv /usr/local' \
    --customize-hook='cp -L /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"' \
    --customize-hook='printf "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n" >"$1/etc/pip.conf"' \
    bookworm "$folder/root.tar"
docker import --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
    --change 'CMD ["python3"]' "$folder/root.tar" "$image" >/dev/null
