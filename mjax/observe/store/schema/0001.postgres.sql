-- PostgreSQL only: spans arrive almost in the order of steps, so block range indexes are
-- small and cheap to update. DuckDB keeps such ranges for every column by itself.
create index spans_by_step on spans using brin (step);
create index spans_by_file on spans using brin (file_id);
