#!/bin/sh
# Runs once, when Postgres makes its data directory: a role for Grafana that may read, and nothing else.
set -eu
psql --quiet --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" --set password="$POSTGRES_READER_PASSWORD" <<'SQL'
CREATE ROLE reader LOGIN PASSWORD :'password';
ALTER ROLE reader SET default_transaction_read_only = on;
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO reader;
GRANT USAGE ON SCHEMA public TO reader;
SQL
