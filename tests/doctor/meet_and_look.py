"""One process of `mjax.doctor --together`, without the checks of its host.

Usage: meet_and_look.py ADDRESS NUM RANK WORK_DIR LIMIT_S [bad] [HOSTS]
"""

import pathlib
import sys

from mjax.doctor import together
from mjax.processes.config import DistributedConfig


def main() -> int:
    address, num, rank, work_dir, limit_s, *more = sys.argv[1:]
    bad = "bad" in more
    hosts = [word for word in more if word != "bad"]
    check = {"name": "gpu.count", "state": "failed", "reason": "7 GPUs, not 8"}
    return together.main(
        {"ok": not bad, "host": f"host-{rank}", "checks": [check] if bad else []},
        DistributedConfig(
            coordinator=address,
            num_processes=int(num),
            process_id=int(rank),
            timeout_s=int(float(limit_s)),
        ),
        hosts=int(hosts[0]) if hosts else 1,
        work_dir=pathlib.Path(work_dir),
        limit_s=float(limit_s),
        is_json=True,
    )


if __name__ == "__main__":
    sys.exit(main())
