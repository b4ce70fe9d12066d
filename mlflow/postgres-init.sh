#!/bin/sh
# Run once, by PostgreSQL's image on an empty volume: a role and a database per server, with no other rights.
set -eu
for name in mlflow prefect; do
  psql -v ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres \
    -v name="$name" -v password="$(cat "${SECRETS:-/run/secrets}/$name")" <<'SQL'
CREATE ROLE :"name" LOGIN PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name";
REVOKE ALL ON DATABASE :"name" FROM PUBLIC;
SQL
done
