"""Known and unknown facts of a host."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mjax.launch import facts


def test_bytes_of_rdma_ports_are_words_times_four(tmp_path):
    for port, sent, received in (("1", "10", "3"), ("2", "0", "no number")):
        counters = tmp_path / "mlx5_0" / "ports" / port / "counters"
        counters.mkdir(parents=True)
        (counters / "port_xmit_data").write_text(f"{sent}\n")
        (counters / "port_rcv_data").write_text(f"{received}\n")
    assert facts.rdma_bytes(tmp_path) == {"mlx5_0/1": [40, 12]}


def test_a_host_without_rdma_has_no_ports(tmp_path):
    assert facts.rdma_bytes(tmp_path / "infiniband") == {}


class NVMLError(Exception):
    pass


def nvml(fails=False):
    def init():
        if fails:
            raise NVMLError("Driver Not Loaded")

    return SimpleNamespace(
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: f"NVIDIA H100 {index}",
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        NVMLError=NVMLError,
    )


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (None, {"gpus": "unknown: nvidia-ml-py is not installed"}),
        (nvml(fails=True), {"gpus": "unknown: Driver Not Loaded"}),
        (nvml(), {"gpus": "NVIDIA H100 0, NVIDIA H100 1", "driver": "580.65.06"}),
    ],
)
def test_gpus_that_cannot_be_asked_for_are_unknown(monkeypatch, module, expected):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert facts.gpu_facts() == expected
    assert facts.host_facts().items() >= expected.items()


def test_a_process_knows_its_age_and_the_boot_of_its_host():
    """Another process measures the time from before its start to its answer."""
    code = "import json; from mjax.launch import facts; "
    code += "print(json.dumps(facts.process_facts()))"
    begin_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60
    )
    most_s = time.monotonic() - begin_s
    found = json.loads(done.stdout)
    # The kernel counts the start of a process in hundredths of a second.
    assert 0.0 < found["age_s"] <= most_s + 0.02
    assert found["boot"] == facts.process_facts()["boot"] != ""
    assert found["pid"] != facts.process_facts()["pid"]


def test_a_process_without_proc_has_no_age(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "_STATUS", tmp_path / "none")
    found = facts.process_facts()
    assert (found["age_s"], found["boot"]) == (None, None)
