"""The command reads spans, names the slow host, and says what is wrong with a run."""

import html.parser
import json
from pathlib import Path

import numpy as np
import pytest

from mjax.observe import heat_page, heatmap
from mjax.observe.heat_page import Heat
from mjax.observe.spans import (
    FOLDER,
    Header,
    Line,
    Span,
    encode,
    file_name,
    read_run,
)
from mjax.observe.step_times import StepTimes, step_times

MS = 1_000_000
STEPS = 30


def write_run(
    work_dir: Path,
    hosts: tuple[str, ...],
    *,
    slow: int | None = None,
    late_ms: int = 0,
    stamps: bool = True,
    steps: int = STEPS,
    generation: int = 1,
    save_at: int | None = None,
    pp: int = 1,
    replicas: int = 1,
    gather: bool = False,
) -> None:
    """Write the spans of one process with one device for each of the hosts.

    slow: the rank whose backward pass takes 20% more; late_ms: and whose step begins
    late. All wait for it in `norm`. gather: each step begins with a gather of 1 ms, and
    with the lateness.
    """
    (work_dir / "spans").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for rank, host in enumerate(hosts):
        header = Header(
            run="a",
            host=host,
            rank=rank,
            generation=generation,
            pid=1,
            wall_ns=0,
            monotonic_ns=0,
            devices=(rank,),
            mesh={
                "pp": pp,
                "dp_replicate": replicas,
                "dp_shard": len(hosts) // pp // replicas,
                "tp": 1,
            },
        )
        lines = [encode(header)]
        for step in range(1, steps + 1):
            noise = int(rng.integers(0, MS))
            is_slow = rank == slow
            begin = step * 1000 * MS + rank * 7 * MS  # clocks differ
            late = late_ms * MS if is_slow else 0
            data, dispatch = 2 * MS, 3 * MS + noise + late
            spans = []
            if gather:
                spans.append(Span("gather", "host", "host", begin, begin + MS + late))
                begin += MS + late
                dispatch -= late
            spans += [
                Span("data", "data", "host", begin, begin + data),
                Span("dispatch", "host", "host", begin + data, begin + data + dispatch),
            ]
            forward = begin + data + dispatch
            backward = forward + 100 * MS
            norm = backward + (240 if is_slow else 200) * MS + noise
            end = begin + 600 * MS
            spans.append(Span("device", "compute", "host", forward, end))
            if stamps:
                stream = f"device:{rank}"
                spans += [
                    Span("forward", "compute", stream, forward, backward),
                    Span("backward", "compute", stream, backward, norm),
                    Span("norm", "dp", stream, norm, end),
                    Span("optimizer", "optimizer", stream, end, end + 20 * MS),
                ]
            if step == save_at:
                spans.append(Span("save", "ckpt", "host", end, end + 300 * MS))
            lines.append(encode(Line(n=step - 1, step=step, spans=tuple(spans))))
        (work_dir / "spans" / file_name(header)).write_bytes(b"".join(lines))


def times_of(work_dir: Path) -> StepTimes:
    return step_times(read_run(work_dir)[0])


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = heatmap.main([str(word) for word in argv])
    said = capsys.readouterr()
    return code, said.out, said.err


HOSTS = ("node1", "node2", "node3", "node4")


def test_a_slow_host_is_named_as_json(tmp_path, capsys):
    write_run(tmp_path, HOSTS, slow=2)
    code, out, err = run(capsys, "--work-dir", tmp_path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    (outlier,) = found["outliers"]
    assert outlier["host"] == "node3"
    assert outlier["phase"] == "forward and backward"
    assert outlier["ratio"] == pytest.approx(340 / 300, abs=0.005)
    assert (outlier["ranks"], outlier["devices"]) == ([2], [2])
    assert found["has_stamps"]
    backward = found["phases"].index("backward")
    excess = {row["host"]: row["excess"][backward] for row in found["hosts"]}
    assert max(excess, key=lambda host: excess[host]) == "node3"


def test_a_host_that_dispatches_late_is_named_with_and_without_stamps(tmp_path, capsys):
    for stamps in (True, False):
        work_dir = tmp_path / str(stamps)
        write_run(work_dir, HOSTS, slow=1, late_ms=90, stamps=stamps)
        found = json.loads(run(capsys, "--work-dir", work_dir, "--json")[1])
        assert [each["host"] for each in found["outliers"]] == ["node2"], stamps
        assert found["outliers"][0]["cause"] == "host"
        assert found["has_stamps"] is stamps


def test_a_host_that_gathers_late_is_named_without_stamps(tmp_path, capsys):
    write_run(tmp_path, HOSTS, slow=1, late_ms=90, stamps=False, gather=True)
    code, out, err = run(capsys, "--work-dir", tmp_path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [each["host"] for each in found["outliers"]] == ["node2"]
    assert found["outliers"][0]["cause"] == "host"
    gathers = times_of(tmp_path).phase_s[:, :, found["phases"].index("gather")]
    np.testing.assert_allclose(gathers[:, [0, 2, 3]], 0.001)


def test_with_stamps_a_gather_before_the_step_is_a_known_limit(tmp_path):
    write_run(tmp_path, HOSTS, gather=True)
    (problem,) = times_of(tmp_path).problems
    assert "run some steps with --mesh.no-gather-first" in problem


def test_the_wait_for_data_counts_only_while_the_device_waits(tmp_path):
    """The loop waits 2 ms for data in each step, the device more for its host."""
    write_run(tmp_path, HOSTS)
    times = times_of(tmp_path)
    data = times.phase_s[1:, :, times.phases.index("data")]
    between = times.phase_s[1:, :, times.phases.index("between")]
    np.testing.assert_allclose(data, 0.002)
    idle_s = 1.0 - 0.6 + 0.005  # from the norm's end to the next forward pass, 1 ms
    np.testing.assert_allclose(data + between, idle_s, atol=0.0011)
    assert np.isnan(times.phase_s[0, :, times.phases.index("between")]).all()


def test_the_places_of_the_ranks_come_from_the_mesh(tmp_path):
    write_run(tmp_path, tuple(f"n{i}" for i in range(8)), pp=2, replicas=2)
    layout = times_of(tmp_path).layout
    assert layout.pp.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layout.dp.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.tp.tolist() == [0] * 8


def test_processes_are_judged_where_all_run_on_one_host(tmp_path, capsys):
    write_run(tmp_path, ("laptop",) * 4, slow=2)
    code, out, _ = run(capsys, "--work-dir", tmp_path)
    assert code == 0
    assert "4 processes" in out
    assert "laptop rank 2: compute" in out


def test_a_save_and_the_step_after_it_do_not_count(tmp_path):
    write_run(tmp_path, HOSTS, save_at=20)
    times = times_of(tmp_path)
    assert times.steps[times.left_out].tolist() == [20, 21]


def test_only_the_newest_generation_is_read(tmp_path):
    write_run(tmp_path, HOSTS, steps=12)
    write_run(tmp_path, HOSTS[:3], steps=15, generation=2)
    times = times_of(tmp_path)
    assert (len(times.steps), times.units) == (15, HOSTS[:3])


def test_the_last_steps_alone_can_be_read(tmp_path, capsys):
    write_run(tmp_path, HOSTS)
    _, out, _ = run(capsys, "--work-dir", tmp_path, "--last", 12)
    assert out.startswith("steps 19 to 30, 4 hosts")


def test_a_rank_without_a_file_or_without_times_is_reported(tmp_path, capsys):
    write_run(tmp_path, HOSTS, slow=3)
    files = sorted((tmp_path / "spans").iterdir())
    files[0].unlink()
    header, *_ = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(header)
    (tmp_path / "spans" / "node5-4-1.jsonl").write_bytes(files[2].read_bytes()[:99])
    code, out, err = run(capsys, "--work-dir", tmp_path)
    assert code == 0
    assert "1 devices of the mesh have no spans: 0" in err
    assert "no times of these steps from rank 1" in err
    assert "node5-4-1.jsonl: line 1 is not a header" in err
    assert "no host is slow" in out  # two are left: they have no majority


def test_slow_hosts_are_added_to_the_file_of_excluded_ones(tmp_path, capsys):
    write_run(tmp_path, HOSTS, slow=2)
    path = tmp_path / "exclude"
    path.write_text("node9\n")
    out = ""
    for _ in range(2):
        code, out, _ = run(capsys, "--work-dir", tmp_path, "--exclude", path)
        assert code == 0
        assert path.read_text() == "node3\nnode9\n"
    assert "2 hosts to leave out" in out


def test_a_file_that_would_leave_out_every_host_is_not_written(tmp_path, capsys):
    write_run(tmp_path, ("laptop",) * 4, slow=2)
    path = tmp_path / "exclude"
    code, out, err = run(capsys, "--work-dir", tmp_path, "--exclude", path)
    assert (code, out) == (2, "")
    assert "would leave out all hosts of the run (laptop)" in err
    assert not path.exists()


def test_a_file_that_is_no_list_of_hosts_is_left_as_it_is(tmp_path, capsys):
    write_run(tmp_path, HOSTS, slow=2)
    path = tmp_path / "notes"
    path.write_text("buy milk\n")
    code, _, err = run(capsys, "--work-dir", tmp_path, "--exclude", path)
    assert code == 2
    assert "has the line 'buy milk'" in err
    assert path.read_text() == "buy milk\n"


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_escapes_names(tmp_path, capsys):
    bad = "<script src=//x>&"
    write_run(tmp_path, ("node1", "node2", "node3", bad), slow=3)
    path = tmp_path / "heat.html"
    code, _, _ = run(capsys, "--work-dir", tmp_path, "--out", path)
    assert code == 0
    page = path.read_text()
    assert "&lt;script src=//x&gt;&amp;" in page
    parsed = _Tags()
    parsed.feed(page)
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "img", "image", "iframe", "use"}
    assert not any({"src", "href"} & attrs.keys() for _, attrs in parsed.tags)
    assert "default-src 'none'" in page
    frames = [a for tag, a in parsed.tags if tag == "rect" and a.get("stroke")]
    assert len(frames) == 2  # forward and backward of the slow host


def test_a_long_page_shows_the_first_rows_and_says_how_many_are_left():
    num = heat_page.MOST_ROWS + 7
    heat = Heat(
        title="",
        rows=tuple(f"n{i}" for i in range(num)),
        columns=("a",),
        percent=np.zeros((num, 1)),
        told=("",) * num,
        marked=(frozenset(),) * num,
    )
    page = heat_page.page(heat)
    assert "7 more hosts" in page
    assert ">n999<" in page
    assert ">n1000<" not in page


def test_colours_go_from_blue_over_white_to_orange():
    less, none, more = (heat_page.colour(v) for v in (-50.0, 0.0, 50.0))
    assert (less, none, more) == ("#2166ac", "#f7f7f7", "#d95f02")
    assert heat_page.colour(float("nan")) == "#d9d9d9"


def test_a_rank_whose_peers_have_no_files_is_not_judged(tmp_path, capsys):
    write_run(tmp_path, HOSTS)
    first, *others = sorted((tmp_path / FOLDER).iterdir())
    for path in others:
        path.unlink()
    code, _, err = run(capsys, "--work-dir", tmp_path)
    assert code == 2
    assert f"has spans of one rank only (on {first.name.partition('-')[0]})" in err


@pytest.mark.parametrize(
    ("hosts", "steps", "says"),
    [
        (("node1",), STEPS, "generation 1 has one rank (on node1), and no other to"),
        (HOSTS, 0, "generation 1 has run no step yet"),
        (HOSTS, 7, "7 steps are too few"),
    ],
)
def test_a_run_that_cannot_be_judged_is_refused_in_one_line(
    tmp_path, capsys, hosts, steps, says
):
    write_run(tmp_path, hosts, steps=steps)
    code, out, err = run(capsys, "--work-dir", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_run_without_spans_or_with_foreign_ones_is_refused(tmp_path, capsys):
    code, _, err = run(capsys, "--work-dir", tmp_path)
    assert code == 2
    assert "has no spans; name the work dir of a run with --work-dir" in err
    folder = tmp_path / "spans"
    folder.mkdir()
    (folder / "node1-0-1.jsonl").write_text("{}\n")
    code, _, err = run(capsys, "--work-dir", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "no file of spans can be read" in err


def test_spans_of_unknown_names_are_refused(tmp_path, capsys):
    write_run(tmp_path, HOSTS, stamps=False)
    for path in (tmp_path / "spans").iterdir():
        text = path.read_text()
        for name in ("data", "dispatch", "device"):
            text = text.replace(f'["{name}"', '["other"')
        path.write_text(text)
    code, _, err = run(capsys, "--work-dir", tmp_path)
    assert code == 2
    assert "has no time of any of gather, data, dispatch, device" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--last", "0"), "--last must be at least 1, got 0"),
        (("--rows", "-1"), "--rows must be at least 1, got -1"),
        (("--out", "nowhere/heat.html"), "the folder nowhere does not exist"),
    ],
)
def test_a_bad_flag_is_refused(tmp_path, capsys, flags, says):
    write_run(tmp_path, HOSTS)
    code, out, err = run(capsys, "--work-dir", tmp_path, *flags)
    assert (code, out) == (2, "")
    assert says in err
