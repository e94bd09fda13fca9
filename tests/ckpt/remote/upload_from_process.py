"""One process of a run that uploads a step, and restores it from the store.

    python upload_from_process.py RANK NUM PORT FOLDER URL

Prints one JSON object: the files that this process has sent, the messages, and whether
the restored arrays have the same bits.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.remote import transfer
from mjax.processes import distributed
from mjax.processes.config import DistributedConfig

STEP = 5


def upload(config: CkptConfig, folder: Path, state: dict, abstract: dict) -> dict:
    """Save a step and upload it; return the messages."""
    manager = Checkpoints(folder, config)
    manager.newest()
    assert manager.restore(abstract) is None
    manager.claim("", 0)
    manager.save(STEP, lambda: state, {"seed": STEP})
    is_saved = manager.wait()
    manager.attempts()
    missing = manager.finish_uploads()
    told = [upload.describe() for upload in manager.uploads()]
    manager.close()
    return {"is_saved": is_saved, "missing": missing, "told": told}


def main() -> None:
    rank, num, port = map(int, sys.argv[1:4])
    folder, config = Path(sys.argv[4]), CkptConfig(remote=sys.argv[5], remote_wait_s=60)
    distributed.start(
        DistributedConfig(
            coordinator=f"127.0.0.1:{port}", num_processes=num, process_id=rank
        )
    )
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, PartitionSpec("x"))
    whole = np.random.default_rng(STEP).normal(size=(64, 32)).astype(np.float32)
    state = {"w": jax.make_array_from_callback(whole.shape, where, whole.__getitem__)}
    abstract = {"w": jax.ShapeDtypeStruct(whole.shape, jnp.float32, sharding=where)}
    sent: list[str] = []
    send = transfer.upload

    def note(remote, step, save_id, folder, files) -> None:
        send(remote, step, save_id, folder, files)
        sent.extend(files)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transfer, "upload", note)
        report = upload(config, folder / "first", state, abstract)
    manager = Checkpoints(folder / "second", config)
    newest = manager.newest()
    restored = manager.restore(abstract)
    assert newest is not None
    assert restored is not None
    is_same = all(
        np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
        for shard in restored.state["w"].addressable_shards
    )
    manager.close()
    report |= {"newest": newest.step, "restored": restored.step, "sent": sent}
    print(json.dumps(report | {"source": restored.source, "is_same": is_same}))


if __name__ == "__main__":
    main()
