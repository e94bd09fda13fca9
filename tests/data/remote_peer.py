"""One process of a run: read a data set through the mirror and report.

Usage: remote_peer.py RANK COORDINATOR FOLDER PATH; the report is JSON in FOLDER/report.
"""

import json
import pathlib
import sys

from mjax.data import remote_hosts
from mjax.data.config import CacheConfig, DataConfig
from mjax.data.dataset import open_dataset
from mjax.processes import distributed
from mjax.processes.agreement import Agreement
from mjax.processes.config import DistributedConfig


def main(rank: str, coordinator: str, folder: str, path: str) -> None:
    distributed.start(
        DistributedConfig(
            coordinator=coordinator, num_processes=2, process_id=int(rank)
        )
    )
    config = DataConfig(
        path=(path,),
        seq_len=8,
        cache_dir=f"{folder}/tokens",
        cache=CacheConfig(mirror_dir=f"{folder}/blocks"),
    )
    agreement = Agreement("test")
    with remote_hosts.shared(config, agreement) as files:
        dataset = agreement.together(lambda: open_dataset(config, seed=0, remote=files))
    report = {"fingerprint": dataset.fingerprint, "origins": dataset.origins}
    pathlib.Path(folder, "report").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
