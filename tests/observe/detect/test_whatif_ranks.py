"""The cost of single ranks is found, whichever ranks wait for them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mjax.observe.spans import FOLDER, Header, Kind, Line, Span, encode, file_name
from mjax.observe.whatif import Answer, answer

STEPS = 22
PASS_S = {"forward": 0.10, "backward": 0.20, "tick": 0.05}
NORM_S, OPTIMIZER_S, GAP_S = 0.03, 0.02, 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A generated run: which ranks wait for which, and what takes longer than usual."""

    mesh: Mapping[str, int]
    passes: tuple[str, ...] = ("forward", "backward")
    dp_waits: tuple[bool, ...] = (True, True)
    """Whether a pass ends together in the dp group, for each pass."""
    slow: Mapping[tuple[int, str, int], float] = dataclasses.field(default_factory=dict)
    """Seconds more, by rank, phase (data, host or number of a pass) and step; step 0 is
    every step."""
    noise: float = 0.004

    def places(self) -> list[tuple[int, int, int]]:
        pp, _, dp, tp = self.mesh.values()
        return [(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)]

    def needs(self, rank: int, phase: str, step: int) -> float:
        more = self.slow.get((rank, phase, 0), 0.0)
        return more + self.slow.get((rank, phase, step), 0.0)

    def waits_for(self, rank: int, number: int) -> list[int]:
        places = self.places()
        pp, dp, _ = places[rank]
        found = []
        for other, (p, d, _) in enumerate(places):
            same_tp = (p, d) == (pp, dp)
            neighbour = self.passes[number] == "tick" and d == dp
            # With collectives of tp and dp in each layer, all wait for all.
            same_dp = self.dp_waits[number] and p == pp
            if same_tp or neighbour or same_dp:
                found.append(other)
        return found


def write(run: Run, work_dir: Path, saves: tuple[int, ...] = ()) -> float:
    """Simulate a run and write its spans; return the mean step after the third."""
    rng = np.random.default_rng(0)
    num = len(run.places())
    lines: list[list[Line]] = [[] for _ in range(num)]
    free, ends = np.zeros(num), []
    for step in range(1, STEPS + 1):
        noise = np.exp(rng.normal(0, run.noise, (len(run.passes), num)))
        waited = np.array([run.needs(w, "data", step) for w in range(num)])
        late = np.array([run.needs(w, "host", step) for w in range(num)])
        begun = free + waited + late + GAP_S
        times = [begun]
        for number, name in enumerate(run.passes):
            came = [times[-1][run.waits_for(w, number)].max() for w in range(num)]
            more = [run.needs(w, str(number), step) for w in range(num)]
            times.append(np.array(came) + PASS_S[name] * noise[number] + more)
        norm = np.full(num, times[-1].max() + NORM_S)
        for w in range(num):
            spans = [span("data", "data", "host", free[w], free[w] + waited[w])]
            device = f"device:{w}"
            for number, name in enumerate(run.passes):
                pair = times[number][w], times[number + 1][w]
                spans.append(span(name, "compute", device, *pair))
            spans.append(span("norm", "dp", device, times[-1][w], norm[w]))
            end = norm[w] + OPTIMIZER_S
            # A late host notices the end of its step late.
            seen = end + run.needs(w, "host", step + 1)
            spans.append(span("optimizer", "optimizer", device, norm[w], seen))
            if step in saves:
                spans.append(span("save", "ckpt", "host", end, end + 1.0))
            lines[w].append(Line(n=len(lines[w]), step=step, spans=tuple(spans)))
        free = norm + OPTIMIZER_S + (1.0 if step in saves else 0.0)
        ends.append(norm[0] + OPTIMIZER_S)
    folder = work_dir / FOLDER
    folder.mkdir(parents=True)
    for w in range(num):
        header = Header(
            run="r",
            host=f"host-{w}",
            rank=w,
            generation=1,
            pid=1,
            wall_ns=0,
            monotonic_ns=0,
            devices=(w,),
            mesh=dict(run.mesh),
        )
        data = b"".join(map(encode, [header, *lines[w]]))
        (folder / file_name(header)).write_bytes(data)
    return float(np.mean(np.diff(ends)[2:]))


def span(name: str, kind: Kind, stream: str, start_s: float, end_s: float) -> Span:
    return Span(name, kind, stream, int((start_s + 9) * 1e9), int((end_s + 9) * 1e9))


def mesh(pp: int = 1, dp: int = 1, tp: int = 1) -> dict[str, int]:
    return {"pp": pp, "dp_replicate": 1, "dp_shard": dp, "tp": tp}


def judged(run: Run, tmp_path: Path) -> tuple[Answer, float, float]:
    """Return the answer, and the mean step with and without the slowness."""
    slow_s = write(run, tmp_path / "slow")
    even_s = write(dataclasses.replace(run, slow={}), tmp_path / "even")
    return answer(tmp_path / "slow", 4), slow_s, even_s


TICKS = {"passes": ("tick",) * 4 + ("backward",), "dp_waits": (False,) * 5}
EVERY_FIFTH = {(2, "host", step): 1.0 for step in range(5, STEPS, 5)}
KINDS = {
    "late host": ({(2, "host", 0): 0.4}, "late host"),
    "slow loader": ({(2, "data", 0): 0.4}, "slow loader"),
    "slow forward": ({(2, "0", 0): 0.4}, "slow host"),
    "a pause in every fifth step": (EVERY_FIFTH, "pauses"),
    "a pause in a pass": ({(2, "1", 9): 2.0, (2, "0", 15): 2.0}, "pauses"),
}
SHAPES = {
    "dp that waits": Run(mesh=mesh(dp=4)),
    "dp that overlaps": Run(mesh=mesh(dp=4), dp_waits=(False, False)),
    "dp that waits backward": Run(mesh=mesh(dp=4), dp_waits=(False, True)),
    "dp and tp": Run(mesh=mesh(dp=2, tp=2)),
    "pp and dp": Run(mesh=mesh(pp=2, dp=2), **TICKS),
}


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("shape", [*SHAPES])
def test_a_slow_rank_is_named_with_what_it_costs(shape, kind, tmp_path):
    slow, name = KINDS[kind]
    run = dataclasses.replace(SHAPES[shape], slow=slow)
    found, slow_s, even_s = judged(run, tmp_path)
    first = found.found.first
    assert first is not None
    assert first.name == name
    assert [found.workers[w].rank for w in first.workers] == [2]
    measured_s = float(found.found.step_s.mean())
    assert measured_s == pytest.approx(slow_s, rel=1e-3)
    # Noise of 0.4% of the passes, and the median of two ranks is the faster one.
    assert float(first.step_s.mean()) - even_s == pytest.approx(
        0, abs=0.03 * (slow_s - even_s)
    )


@pytest.mark.parametrize("noise", [0.004, 0.05])
@pytest.mark.parametrize("shape", [*SHAPES])
def test_nobody_is_named_in_an_even_run(shape, noise, tmp_path):
    write(dataclasses.replace(SHAPES[shape], noise=noise), tmp_path)
    found = answer(tmp_path)
    assert found.found.first is None
    assert abs(found.found.saved) < 0.01


def test_a_device_that_is_slow_in_all_passes_costs_its_part(tmp_path):
    slow = {(1, "0", 0): 0.03, (1, "1", 0): 0.06}
    run = dataclasses.replace(SHAPES["dp that overlaps"], slow=slow)
    found, slow_s, even_s = judged(run, tmp_path)
    first = found.found.first
    assert first is not None
    assert (first.name, first.workers) == ("slow host", (1,))
    assert abs(first.step_s.mean() - even_s) < 0.05 * (slow_s - even_s)


def test_what_others_have_stays_when_a_cause_is_taken_out(tmp_path):
    healthy = {(0, "1", 10): 0.3}
    run = dataclasses.replace(SHAPES["dp that waits"], slow=EVERY_FIFTH | healthy)
    write(run, tmp_path / "slow")
    even_s = write(dataclasses.replace(run, slow=healthy), tmp_path / "even")
    first = answer(tmp_path / "slow", 4).found.first
    assert first is not None
    assert (first.name, first.workers) == ("pauses", (2,))
    # The pause is 0.3 s in 19 steps.
    assert first.step_s.mean() == pytest.approx(even_s, abs=0.004)


def test_ranks_that_wait_inside_of_a_pass_are_named_together(tmp_path):
    slow = {(2, "0", 0): 0.4, (3, "0", 0): 0.4}  # between two collectives of tp
    run = dataclasses.replace(SHAPES["dp and tp"], slow=slow)
    found, slow_s, even_s = judged(run, tmp_path)
    first = found.found.first
    assert first is not None
    assert (first.name, first.workers) == ("slow host", (2, 3))
    assert abs(first.step_s.mean() - even_s) < 0.03 * (slow_s - even_s)


def test_ranks_are_compared_with_those_at_their_place_of_the_mesh(tmp_path):
    # Both ranks of the first place of tp have more to do.
    slow = {(rank, number, 0): 0.05 for rank in (0, 2) for number in ("0", "1")}
    write(dataclasses.replace(SHAPES["dp and tp"], slow=slow), tmp_path)
    assert answer(tmp_path).found.first is None


def test_a_run_of_one_replica_has_pauses_only(tmp_path):
    slow = {(1, "0", 0): 0.4} | {(1, "host", 9): 2.0}
    write(Run(mesh=mesh(tp=2), slow=slow), tmp_path)
    first = answer(tmp_path).found.first
    assert first is not None
    assert (first.name, first.workers) == ("pauses", (1,))


@pytest.mark.parametrize(("phase", "step"), [("data", 0), ("0", 0), ("0", 9)])
def test_what_all_wait_for_alike_is_nobody_s(phase, step, tmp_path):
    slow = {(rank, phase, step): 0.4 for rank in range(4)}
    write(dataclasses.replace(SHAPES["dp that waits"], slow=slow), tmp_path)
    assert answer(tmp_path).found.first is None


def test_steps_with_a_save_and_those_after_them_do_not_count(tmp_path):
    write(SHAPES["dp that waits"], tmp_path, saves=(5,))
    assert answer(tmp_path).steps == (9, *range(10, STEPS + 1))
    with pytest.raises(ValueError, match="no consecutive steps"):
        answer(tmp_path, 5, 6)


def test_devices_with_other_passes_are_refused(tmp_path):
    write(SHAPES["dp that waits"], tmp_path)
    path = sorted((tmp_path / FOLDER).iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b'"backward"', b'"tick"'))
    with pytest.raises(ValueError, match="different passes"):
        answer(tmp_path)
