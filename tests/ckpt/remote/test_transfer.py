"""Who uploads which file of a step."""

import itertools

import pytest

from mjax.ckpt.layout import STATE, part_dir
from mjax.ckpt.manifest import MAIN_FILE, part_name
from mjax.ckpt.remote import transfer
from mjax.ckpt.remote.steps import File

FILES = [
    MAIN_FILE,
    *(part_name(rank) for rank in range(12)),
    f"{STATE}/manifest.ocdbt",
    f"{STATE}/d/0123",
    *(f"{STATE}/{part_dir(rank)}/d/{rank}" for rank in range(12)),
]


def test_each_process_uploads_what_it_has_written():
    assert transfer.share(FILES, 11, 12) == [
        part_name(11),
        f"{STATE}/{part_dir(11)}/d/11",
    ]
    assert {MAIN_FILE, f"{STATE}/d/0123"} <= {*transfer.share(FILES, 0, 12)}


@pytest.mark.parametrize("num", [1, 2, 5, 12, 16])
def test_every_file_is_uploaded_and_downloaded_once(num: int):
    shares = [transfer.share(FILES, rank, num) for rank in range(num)]
    assert sorted(itertools.chain(*shares)) == sorted(FILES)
    files = {name: File(num_bytes=len(name), sha256="") for name in FILES}
    spread = [transfer.spread(files, rank, num) for rank in range(num)]
    assert sorted(itertools.chain(*spread)) == sorted(FILES)


def test_downloads_are_about_as_large_for_each_process():
    files = {f"{i}": File(num_bytes=100 * i, sha256="") for i in range(40)}
    loads = [
        sum(files[name].num_bytes for name in transfer.spread(files, rank, 4))
        for rank in range(4)
    ]
    assert max(loads) - min(loads) <= 100
