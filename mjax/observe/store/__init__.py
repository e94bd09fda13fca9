"""The database of observed runs: schema, parsing of lines, DuckDB and PostgreSQL.

Input: batches of lines from a run's files. Output: rows, each exactly once, and views
over them. `open_store` opens either database; `Ingester` writes to it.
"""
