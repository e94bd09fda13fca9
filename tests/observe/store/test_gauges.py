"""What Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from mjax.observe import spans
from mjax.observe.store.duck import DuckStore
from mjax.observe.store.ingester import Ingester
from mjax.observe.stream import gauges
from mjax.observe.stream.gauges import RankAge, Snapshot
from tests.observe.store.run_files import (
    STEP_NS,
    batch,
    header,
    metric_bytes,
    span_bytes,
)


def parsed(data: bytes) -> dict[tuple, float]:
    """Read gauges with Prometheus' own parser."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
    }


def test_each_gauge_has_its_labels_and_value():
    snapshot = Snapshot(
        latest={"r1": {"step": 7.0, "loss": 2.5}, 'r"\n\\2': {"mfu": 0.25}},
        ages=[RankAge(run="r1", host="n7", rank=13, age_s=1.5)],
        behind={"n7:/work": (4096, 3.0)},
        bad_lines=2,
    )
    assert parsed(gauges.render(snapshot)) == {
        ("mjax_step", ("run", "r1")): 7.0,
        ("mjax_loss", ("run", "r1")): 2.5,
        ("mjax_mfu", ("run", 'r"\n\\2')): 0.25,
        (
            "mjax_newest_span_age_seconds",
            ("host", "n7"),
            ("rank", "13"),
            ("run", "r1"),
        ): 1.5,
        ("mjax_stream_behind_bytes", ("collector", "n7:/work")): 4096.0,
        ("mjax_stream_silent_seconds", ("collector", "n7:/work")): 3.0,
        ("mjax_bad_lines",): 2.0,
    }


def test_a_store_shows_its_newest_rows_and_the_ranks_that_still_run():
    store = DuckStore(":memory:")
    ingester = Ingester(store)

    def files(rank: int, generation: int, more: bytes = b""):
        source = f"spans/{spans.file_name(header(rank, generation))}"
        return batch(span_bytes(rank, 3, generation) + more, source)

    ended = spans.encode(spans.Line(n=3, end=0))
    ingester.submit(
        [
            *(files(0, 1), files(1, 1), files(0, 2), files(1, 2, ended)),
            batch(metric_bytes([1, 2, 3]), "metrics.jsonl", "metrics"),
        ]
    ).result(timeout=60)
    newest = 1_002 * STEP_NS + 6_000_000 + 3
    head = header(0)
    now_ns = newest - head.monotonic_ns + head.wall_ns + 8 * STEP_NS
    found = gauges.read(store, {}, now_ns)
    run = head.run
    assert found.latest == {run: {"step": 3.0, "loss": 4.0, "tokens_per_s": 1000.0}}
    assert found.ages == [RankAge(run=run, host="node0", rank=0, age_s=8.0)]
    ingester.close()
    store.close()


def test_an_empty_store_has_gauges_without_values():
    store = DuckStore(":memory:")
    text = gauges.render(gauges.read(store, {}, 0))
    assert parsed(text) == {("mjax_bad_lines",): 0.0}
    store.close()
