"""Compare the Mosaic GPU attention kernels, interpreted on a CPU, with the reference.

    python -m scripts.kernels.kernel_parity

Runs the cases of the tests, two at a time. Writes docs/benchmarks/kernel_parity.md and
ends with 1 if an error is larger than rounding explains. Needs no GPU.
"""

import dataclasses
import sys

from scripts.evidence import Table, write_page
from tests.kernels.attention.mosaic_case import FUNCTION
from tests.kernels.attention.mosaic_cases import CASES
from tests.kernels.interpreter.runner import CaseError, Pool

RESULTS = ("out", "lse", "dq", "dk", "dv")


def main() -> int:
    """Run everything, write the page, return 1 if a case fails."""
    rows, worst, failed = [], 0.0, 0
    with Pool() as pool:
        futures = {
            name: pool.submit(FUNCTION, **dataclasses.asdict(case))
            for name, case in CASES.items()
        }
        for name, future in futures.items():
            try:
                errors = future.result()["errors"]
            except CaseError as error:
                failed += 1
                row = [name, *["-"] * len(RESULTS), str(error).splitlines()[0]]
            else:
                worst = max(worst, *errors.values())
                found = {result: f"{error:.2f}" for result, error in errors.items()}
                row = [name, *(found.get(result, "-") for result in RESULTS), ""]
            rows.append(row)
            print(" | ".join(row), flush=True)
    table = Table(
        title="Attention: forward and backward",
        text=(
            "Every case is run with race detection, and with the operands of each "
            "wgmma read when it is waited for. The truth is float64. An error is "
            "the largest of all elements, in units of the error that rounding to 16 "
            "bits explains at that element (`tests/kernels/attention/mosaic_truth.py`)"
            f": at most 1 is allowed, the largest found is {worst:.2f}. "
            f"{len(CASES) - failed} of {len(CASES)} cases ran. A dash: not a result of "
            "the kernel that the case is for."
        ),
        header=("case", *RESULTS, "failure"),
        rows=rows,
    )
    command = "python -m scripts.kernels.kernel_parity"
    print(write_page("kernel_parity", "Kernels = reference", command, [table]))
    return int(failed > 0 or not worst <= 1)


if __name__ == "__main__":
    sys.exit(main())
