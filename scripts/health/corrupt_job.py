"""A training job of a group, in which a host may silently compute wrong results.

    python -m scripts.health.corrupt_job n0,n1 2 WORK_DIR

The job has one simulated device per host. If a host of the group is named in
CORRUPT_HOSTS, the learning rate differs in its last bit: a fault that changes the
computed bits, but neither the exit code nor anything visible.
"""

import os
import sys

_LR = 1e-3


def main(argv: list[str]) -> int:
    """Run the trainer in place of this program."""
    hosts, num, work_dir = argv
    corrupt = set(os.environ.get("CORRUPT_HOSTS", "").split(",")) & set(
        hosts.split(",")
    )
    # 2^-23 of it: one bit of a float32.
    lr = _LR * (1 + 2**-23) if corrupt else _LR
    words = [
        *(sys.executable, "-m", "mjax.train", "--recipe", "debug", "--steps", "3"),
        *("--simulate-devices", num, "--seed", "0", "--optim.lr", repr(lr)),
        *("--work-dir", work_dir),
    ]
    os.execv(words[0], words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
