"""Run the GPU report as on a machine with a GPU, but on a CPU with a GPU's name.

    python -m tests.scripts.fake_gpu KIND report --part correctness --out DIR
    python -m tests.scripts.fake_gpu KIND tune --out DIR
    python -m tests.scripts.fake_gpu KIND worker ...        what the first two start

Everything runs as on a GPU: the probe, several processes, the lock, the check of the
device after an error. Shapes are tiny, and blocked attention stands for our kernels.
"""

import dataclasses
import os
import sys
from typing import Any

KIND_VARIABLE = "FAKE_GPU_KIND"


def work(argv: list[str]) -> int:
    """Run the program of `worker` on the CPU."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # jax is imported below
    from scripts.gpu import setting, tuning_times, worker
    from scripts.gpu.timing import Timing

    kind = os.environ[KIND_VARIABLE]
    probe, make_setting = worker.probe, setting.make_setting

    def faked_probe() -> dict[str, Any]:
        return probe() | {"platform": "gpu", "device_kind": kind}

    def faked_setting(mode: Any, **options: Any) -> setting.Setting:
        return dataclasses.replace(make_setting("rehearse", **options), mode=mode)

    worker.probe, worker.make_setting = faked_probe, faked_setting
    for name, value in (("small", True), ("ours", "blocked")):
        setattr(setting.Setting, name, value)

    def measure(case: Any, setting: setting.Setting) -> dict[str, Any]:
        """Stand in for kernels that no CPU runs: kernels with more stages are
        faster."""
        with setting.exclusive():
            timing = Timing(median_ms=1 / case.config.stages, spread=0.0, calls=1)
        ms = {str(window or "full"): timing.median_ms for window in (1024, None)}
        return {"ms": ms, "median_ms": timing.median_ms, "spread": timing.spread}

    tuning_times.measure = measure
    return worker.main(argv[0], argv[1], argv[2])  # pyright: ignore[reportArgumentType]


def main(kind: str, program: str, argv: list[str]) -> int:
    """Run one of the programs."""
    os.environ[KIND_VARIABLE] = kind
    if program == "worker":
        return work(argv)
    from scripts.gpu import report, supervise
    from scripts.gpu.parts import PARTS
    from scripts.kernels import tune_attention

    supervise.WORKER = ("tests.scripts.fake_gpu", kind, "worker")
    for part in PARTS.values():
        module = vars(part.module)
        module.update(
            cases=lambda small, every=module["cases"]: every(True),
            tables=lambda rows, small, every=module["tables"]: every(rows, True),
        )
    return (report if program == "report" else tune_attention).main(argv)


if __name__ == "__main__":
    exit_code = main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    os._exit(exit_code)
