"""Compare a step of the work dir with its checksums before it is uploaded.

Input: the folder of a committed step. Output: nothing, or an error that names the part
that differs. Each process reads the pieces that it wrote, as it uploads the files that
it wrote (`transfer`).
"""

from etils import epath

from mjax.ckpt import arrays
from mjax.ckpt.saved_step import read_checked
from mjax.ckpt.store import manifest_in, pieces_in, pieces_of


def check(step_dir: epath.Path, save_id: str, rank: int, num_processes: int) -> None:
    """Read the pieces of one process and compare them with their CRC32C.

    Process 0 also checks that the pieces of all processes cover every leaf. One piece
    is in memory at a time. Files that only Orbax reads are not checked.

    Args:
      step_dir: folder of the step.
      save_id: id of the save that the folder must hold.
      rank: rank of this process.
      num_processes: number of processes. If more processes wrote the step, their pieces
        are distributed round-robin.
    Raises:
      DamagedError: a file is missing, or differs from what was saved.
      OSError: the folder now holds another save of the step.
      RuntimeError: the disk does not answer, so the step could not be checked.
    """
    manifest = manifest_in(step_dir)
    if manifest.save_id != save_id:
        raise OSError(f"{step_dir} was saved again during its upload")
    if rank == 0:
        pieces_in(step_dir, manifest)
    reader = arrays.Reader(step_dir)
    where = f"{step_dir.name}/{arrays.STATE}"
    for part in range(rank, len(manifest.part_sums), num_processes):
        for name, pieces in pieces_of(step_dir, manifest, part).items():
            for piece in pieces:
                read_checked(reader, name, manifest.leaves[name], piece, where)
