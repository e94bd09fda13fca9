"""The sampler reads the files at the right times; a link that went down is reported."""

import itertools
import json

import pytest

from mjax.health import __main__ as health
from mjax.health.watch import command
from mjax.health.watch.samples import Sample, Step, Window
from mjax.health.watch.sampling import Rates, Rows, find_ports, observe
from mjax.observe import events as run_events


class Host:
    """Ports as files, and a clock that advances only while the sampler waits."""

    def __init__(self, root, *names):
        self.root, self.now_s, self.plans = root, 1000.0, []
        for name in names:
            path = self.path(name)
            for folder in ("counters", "hw_counters"):
                (path / folder).mkdir(parents=True)
            self.write(name, "state", "4: ACTIVE")
            self.write(name, "rate", "400 Gb/sec (4X NDR)")
            self.write(name, "link_layer", "InfiniBand")
            for counter in ("port_xmit_data", "port_rcv_data", "link_downed"):
                self.write(name, f"counters/{counter}", "0")
            self.write(name, "hw_counters/local_ack_timeout_err", "0")

    def path(self, name):
        device, number = name.split("/")
        return self.root / device / "ports" / number

    def write(self, name, file, text):
        (self.path(name) / file).write_text(f"{text}\n")

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for plan in [one for one in self.plans if one[0] <= self.now_s]:
            self.plans.remove(plan)
            plan[1]()

    def observe(self, seconds, rows=None, **rates):
        ports = find_ports(self.root)
        until_s = self.now_s + seconds
        return list(
            observe(ports, Rates(**rates), rows, until_s, self.clock, self.sleep)
        )


def test_ports_are_sampled_each_second_and_have_windows_in_turn(tmp_path):
    host = Host(tmp_path, "mlx5_0/1", "mlx5_1/1")
    host.write("mlx5_1/1", "counters/port_xmit_data", str(2**40))
    seen = host.observe(70.0)
    samples = [one for port, one in seen if port.name == "mlx5_0/1"]
    times = [one.time_s - 1000 for one in samples if isinstance(one, Sample)]
    assert times[:5] == pytest.approx([0, 1, 2, 3, 4], abs=1e-6)
    assert max(b - a for a, b in itertools.pairwise(times)) < 2.1
    windows = [(port.name, one) for port, one in seen if isinstance(one, Window)]
    assert [name for name, _ in windows] == ["mlx5_0/1", "mlx5_1/1"]
    assert len(windows[0][1].time_s) == pytest.approx(200, abs=2)
    assert set(windows[1][1].port_xmit_data.tolist()) == {2**40}
    last = [one for port, one in seen if port.name == "mlx5_1/1"][-1]
    assert isinstance(last, Sample)
    assert (last.state, last.counters["port_xmit_data"]) == (4, 2**40)


def test_a_link_that_falls_is_told_with_its_port_and_time(tmp_path):
    host = Host(tmp_path / "sys", "mlx5_0/1", "mlx5_1/1")
    fall = lambda: host.write("mlx5_1/1", "counters/link_downed", "1")  # noqa: E731
    host.plans.append((1005.5, fall))
    seen = host.observe(20.0)
    events = tmp_path / "events.jsonl"
    with events.open("a") as file:
        assert command._tell(find_ports(host.root), seen, True, file) == 1
    (line,) = events.read_text().splitlines()
    said = json.loads(line)
    assert (said["kind"], said["data"]["port"]) == ("port_flap", "mlx5_1/1")
    assert 1005 <= said["data"]["onset_s"] <= said["data"]["until_s"] <= 1007
    assert said["time_ns"] == int(said["data"]["until_s"] * 1e9)
    (read,), problems = run_events.read(tmp_path)
    assert (read.kind, read.generation, read.text) == ("port_flap", None, said["text"])
    assert problems == []


def test_new_rows_of_a_run_are_steps_and_old_ones_are_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "step_s": 9.0}\n')
    rows = Rows(path)
    assert rows.steps(5.0) == []
    with path.open("a") as file:
        file.write('{"step": 2, "step_s": 1.5}\nno JSON\n{"step": 3, "st')
        file.flush()
        assert rows.steps(6.0) == [Step(end_s=6.0, step_s=1.5)]
        file.write('ep_s": 2.5}\n')
    assert rows.steps(7.0) == [Step(end_s=7.0, step_s=2.5)]
    # A run that resumes removes the rows of steps that it takes again.
    path.write_text('{"step": 1, "step_s": 9.0}\n')
    assert rows.steps(8.0) == []
    with path.open("a") as file:
        file.write('{"step": 2, "step_s": 3.5}\n')
    assert rows.steps(9.0) == [Step(end_s=9.0, step_s=3.5)]
    path.unlink()
    assert rows.steps(9.5) == []
    path.mkdir()
    with pytest.raises(ValueError, match="is a folder, not a file; move it away"):
        Rows(path)


def test_a_port_that_is_down_or_cannot_be_read_is_not_watched(tmp_path, capsys):
    host = Host(tmp_path, "mlx5_0/1", "mlx5_1/1")
    host.write("mlx5_1/1", "state", "1: DOWN")
    assert [port.name for port in find_ports(tmp_path)] == ["mlx5_0/1"]
    host.write("mlx5_0/1", "rate", "unknown")
    assert health.main(["ports", "--root", str(tmp_path), "--seconds", "1"]) == 2
    assert f"error: no active port below {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "--seconds must be positive, got 0"),
        (["--sample-s", "-1"], "--sample-s must be positive and finite, got -1"),
        (["--window-hz", "inf"], "--window-hz must be positive and finite, got inf"),
    ],
)
def test_bad_numbers_are_refused(words, message, tmp_path, capsys):
    Host(tmp_path, "mlx5_0/1")
    assert health.main(["ports", "--root", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_help_begins_with_the_purpose_and_gives_units(capsys):
    with pytest.raises(SystemExit):
        health.main(["ports", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "watch the network ports of this host. options:" in text
    assert "length of a window in seconds" in text


def test_a_healthy_port_is_watched_for_real_and_nothing_is_told(tmp_path, capsys):
    Host(tmp_path, "mlx5_0/1")
    words = ["ports", "--root", str(tmp_path), "--seconds", "0.3"]
    words += ["--sample-s", "0.05", "--window-every-s", "0.1", "--window-s", "0.05"]
    assert health.main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "watching mlx5_0/1" in captured.err
