#!/bin/sh
# Makes the secrets that compose.yaml mounts, where there are none yet: random, in ./secrets.
set -eu
cd "$(dirname "$0")"

# The folder keeps others out. The files in it are mounted one by one, into containers of several
# users, so each may be read by everybody who gets that far.
mkdir -p secrets
chmod 0700 secrets
for name in postgres_password s3_secret_key grafana_password; do
    if [ ! -s "secrets/$name" ]; then
        od -An -tx1 -N24 /dev/urandom | tr -d ' \n' >"secrets/$name"
        chmod 0444 "secrets/$name"
    fi
done
