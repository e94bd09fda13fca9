"""Prepare a large generated corpus, kill the preparation again and again, and compare.

    python -m scripts.data.prepare_killed --gigabytes 20 --folder /tmp/killed

Writes a corpus of so much text as shards of .jsonl.zst and, while it does, hashes the
token files that must come of it: the bytes of each document and the token that ends it,
on the side that the hash of its name gives. Then it runs `python -m mjax.data prepare`,
kills it with SIGKILL five times (once while it reads, then while it tokenizes), lets it
finish, and compares the SHA-256 of both token files. Prints the peak of resident memory
over all processes. Needs disk for 2 bytes per byte of text and the compressed corpus.
Everything is a function of --seed, so another run compares with the printed hashes.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pyarrow

from mjax.data.prepare import SIDES, Side, is_held_out, stream_path
from mjax.data.tokenizers import BytesTokenizer

SHARD_BYTES = 10**9
NUM_PARAGRAPHS = 1024
HELD_OUT = 0.05
EOS = np.array([BytesTokenizer.eos_id], np.uint16).tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.data.prepare_killed")
    parser.add_argument("--gigabytes", type=float, default=0.2)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    corpus, cache = args.folder / "corpus", args.folder / "cache"
    corpus.mkdir(parents=True)
    expected, sizes = generate(corpus, int(args.gigabytes * 1e9), args.seed)
    on_disk = sum(path.stat().st_size for path in corpus.iterdir())
    print(f"corpus: {args.gigabytes} GB of text, {on_disk / 1e9:.2f} GB compressed")
    print(f"generated in {time.monotonic() - begun:.0f} s", flush=True)
    peaks, begun = [], time.monotonic()
    command = [sys.executable, "-m", "mjax.data", "prepare"]
    command += ["--data.path", str(corpus), "--data.cache-dir", str(cache)]
    command += ["--data.held-out-fraction", str(HELD_OUT)]
    for kill in range(args.kills + 1):
        with (args.folder / f"log-{kill}.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            is_last = kill == args.kills
            share = 2.0 if is_last else kill / args.kills
            reached, peak = watch(process, cache, share * sum(sizes.values()))
            process.kill()
            code = process.wait()
        peaks.append(peak)
        print(
            f"process {kill}: exit {code}, {reached / 1e9:.2f} GB of token files, peak "
            f"{peak / 1e6:.0f} MB, {time.monotonic() - begun:.0f} s since the first",
            flush=True,
        )
        if is_last and code != 0:
            return 1
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    found = {side: digest_of(stream_path(folder, side)) for side in SIDES}
    for side in SIDES:
        print(f"{side}: {sizes[side]} bytes, {found[side]}")
        print(f"{side}: expected {expected[side]}")
    is_same = found == expected
    print(f"the same: {is_same}; peak of resident memory {max(peaks) / 1e6:.0f} MB")
    return 0 if is_same else 1


def generate(
    folder: pathlib.Path, num_bytes: int, seed: int
) -> tuple[dict[Side, str], dict[Side, int]]:
    """Write the shards; return SHA-256 and size of the token files that must come."""
    rng = np.random.default_rng(seed)
    words = ["".join(map(chr, rng.integers(97, 123, size=n))) for n in range(3, 12)] * 9
    paragraphs = [
        " ".join(rng.choice(words, 150)) + " é." for _ in range(NUM_PARAGRAPHS)
    ]
    digests = {side: hashlib.sha256() for side in SIDES}
    sizes, left, number = dict.fromkeys(SIDES, 0), num_bytes, 0
    for shard in range(-(-num_bytes // SHARD_BYTES)):
        name, line, in_shard = f"shard-{shard:05}.jsonl.zst", 0, min(left, SHARD_BYTES)
        with (
            (folder / name).open("wb") as raw,
            pyarrow.CompressedOutputStream(raw, "zstd") as file,
        ):
            while in_shard > 0:
                line += 1
                number += 1
                chosen = rng.integers(len(paragraphs), size=rng.integers(1, 9)).tolist()
                text = " ".join([str(number), *(paragraphs[i] for i in chosen)])
                encoded = text.encode()
                file.write(json.dumps({"text": text}).encode() + b"\n")
                side = SIDES[is_held_out(f"{name}:{line}", HELD_OUT)]
                tokens = np.frombuffer(encoded, np.uint8).astype(np.uint16).tobytes()
                digests[side].update(tokens + EOS)
                sizes[side] += len(tokens) + len(EOS)
                in_shard -= len(encoded)
                left -= len(encoded)
    return {side: digests[side].hexdigest() for side in SIDES}, sizes


def watch(
    process: subprocess.Popen, cache: pathlib.Path, num_bytes: float
) -> tuple[int, int]:
    """Wait until a process has written so many bytes of token files, or has ended.

    Returns:
      bytes of token files, and the peak of its resident memory in bytes.
    """
    reached = peak = 0
    begun = time.monotonic()
    while process.poll() is None:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        for row in status.splitlines():
            if row.startswith("VmHWM:"):
                peak = 1024 * int(row.split()[1])
        reached = sum(path.stat().st_size for path in cache.glob("*/*.tokens"))
        has_begun = time.monotonic() - begun > 3  # the imports of the first process
        if reached >= num_bytes and has_begun:
            break
        time.sleep(0.05)
    return reached, peak


def digest_of(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
