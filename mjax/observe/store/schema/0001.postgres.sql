-- PostgreSQL only: spans arrive almost in the order of steps, which a block range index
-- uses at almost no cost. DuckDB keeps such ranges of every column by itself.
create index spans_by_step on spans using brin (step);
create index spans_by_file on spans using brin (file_id);
