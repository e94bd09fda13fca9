-- Version 2: sums of spans over blocks of 50 steps, for the heat map. A block has the
-- steps from 50 * block on; block -1 has what lies outside of steps. The sums are
-- written in the transaction that writes their spans.

create table phase_totals (
  file_id integer not null,
  block integer not null,
  name text not null,
  kind text not null,
  stream text not null,
  spans bigint not null,
  ns bigint not null,
  primary key (file_id, block, name, kind, stream)
);

insert into phase_totals
select file_id, cast(floor(step / 50.0) as integer) as block, name, kind, stream,
  count(*), cast(sum(end_ns - start_ns) as bigint)
from spans group by file_id, block, name, kind, stream;

create view heat_map as
select p.run, p.generation, p.host, p.rank, t.block * 50 as first_step,
  t.name as phase, t.kind, t.stream, t.spans,
  cast(t.ns as double precision) / 1e9 as seconds
from phase_totals t join processes p on p.file_id = t.file_id;
