-- Version 1: what the files of runs hold, and how far each file was read.
-- The same text runs on DuckDB and on PostgreSQL.

-- One row for each file of a run, with its high-water mark: everything before at_byte
-- is in the tables below, and was written in the transaction that wrote the mark.
create table files (
  file_id integer primary key,
  run text not null,
  source text not null,          -- path below the work dir
  kind text not null,            -- spans, metrics, events
  identity text not null,        -- digest of the first line
  revision integer not null,     -- counts rewrites of the file
  at_byte bigint not null,
  lines bigint not null,         -- lines before at_byte
  last_n bigint not null,        -- spans: the last n, -1 before the first
  last_end_ns bigint,            -- spans: the latest end, on the host's clock
  exit_code integer,             -- spans: of the process, null before its last line
  tail text not null,            -- digest of the last line before at_byte
  unique (run, source)
);

-- One row for each process: the header of its file of spans.
create table processes (
  file_id integer primary key,
  run text not null,
  generation integer not null,
  rank integer not null,
  host text not null,
  pid bigint not null,
  wall_ns bigint not null,       -- wall clock, read together with monotonic_ns
  monotonic_ns bigint not null,
  devices text not null,         -- JSON: flat numbers in the mesh
  mesh text not null,            -- JSON: names and sizes of axes
  unique (run, generation, rank)
);

-- (run, generation, rank, n, i) names a span: file_id stands for the first three.
create table spans (
  file_id integer not null,
  n integer not null,            -- line of the file
  i integer not null,            -- place in the line
  step integer not null,         -- -1 outside of steps
  name text not null,
  kind text not null,
  stream text not null,
  start_ns bigint not null,      -- CLOCK_MONOTONIC of the host
  end_ns bigint not null,
  barrier integer                -- number of the barrier, null for other spans
);

create table metrics (
  run text not null,
  step integer not null,
  revision integer not null,
  at_byte bigint not null,
  loss double precision,
  grad_norm double precision,
  lr double precision,
  tokens bigint,
  step_s double precision,
  data_wait_s double precision,
  tokens_per_s double precision,
  mfu double precision,
  skipped integer,
  eval_loss double precision,
  line text not null,            -- the whole row, JSON
  primary key (run, step)
);

create table events (
  file_id integer not null,
  at_byte bigint not null,
  digest text not null,          -- of the line
  run text not null,
  time_ns bigint not null,       -- wall clock
  source text not null,
  generation integer,
  host text,
  rank integer,
  kind text not null,
  severity text not null,
  text text not null,
  data text not null,            -- JSON
  primary key (file_id, at_byte, digest)
);

-- Lines that were left out, and why.
create table bad_lines (
  file_id integer not null,
  revision integer not null,
  line bigint not null,          -- counted from 1
  reason text not null
);

create view runs as
select run, count(*) as processes, max(generation) as generation,
  count(distinct host) as hosts, min(wall_ns) as first_wall_ns
from processes group by run;

-- Exact seconds of each phase of each step. Filter by step: a query reads all spans of
-- the selected steps.
create view step_phases as
select p.run, p.generation, p.host, p.rank, s.step, s.name as phase, s.kind, s.stream,
  count(*) as spans,
  cast(sum(s.end_ns - s.start_ns) as double precision) / 1e9 as seconds
from spans s join processes p on p.file_id = s.file_id
group by p.run, p.generation, p.host, p.rank, s.step, s.name, s.kind, s.stream;

-- What the host of each process did when, on the wall clock of its host.
create view host_times as
select p.run, p.generation, p.host, p.rank, s.step, s.name as phase, s.kind,
  s.start_ns - p.monotonic_ns + p.wall_ns as start_wall_ns,
  s.end_ns - p.monotonic_ns + p.wall_ns as end_wall_ns
from spans s join processes p on p.file_id = s.file_id
where s.stream = 'host';

-- Processes with the wall time of their newest span.
create view newest_spans as
select p.run, p.generation, p.host, p.rank, f.exit_code, f.last_n,
  f.last_end_ns - p.monotonic_ns + p.wall_ns as end_wall_ns
from processes p join files f on f.file_id = p.file_id;
