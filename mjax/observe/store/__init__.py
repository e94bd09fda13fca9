"""The database of observed runs: schema, parsing of lines, DuckDB and PostgreSQL.

Enters: batches of lines from a run's files. Leaves: rows, each exactly once, and views
over them. `open_store` opens either database; `Ingester` writes to it.
"""
