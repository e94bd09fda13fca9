"""How far mixtures of corpora are from their weights: three rules, measured.

    python -m scripts.data.mixture_error

For random weights of 2 to 30 corpora: the largest difference, over all corpora and all
prefixes of a period (of its first 1000 samples), between the samples of a corpus and
its share of the prefix. Compared are `mjax.data.mixture`, Grain's `MapDataset.mix` as
installed, and the rule of Megatron-LM's `build_blending_indices`: next comes the corpus
whose count is furthest behind its share (written anew here from that description).
Needs no accelerator; half a minute.
"""

import random

import grain
import numpy as np

from mjax.data import mixture

NUM_MIXTURES = 60
MAX_PREFIX = 1000
Weights = tuple[float, ...]


def main() -> None:
    draw = random.Random(0)
    rules = {
        "mjax": by_mjax,
        "Grain": by_grain,
        "largest deficit": by_largest_deficit,
    }
    print(" | ".join(["corpora", *rules]))
    for num_corpora in (2, 3, 5, 10, 30):
        worst = dict.fromkeys(rules, 0.0)
        for _ in range(NUM_MIXTURES):
            weights = tuple(float(draw.randint(1, 20)) for _ in range(num_corpora))
            length = min(int(sum(weights)), MAX_PREFIX)
            for name, rule in rules.items():
                error = largest_error(rule(weights, length), weights)
                worst[name] = max(worst[name], error)
        cells = [str(num_corpora), *(f"{error:.3f}" for error in worst.values())]
        print(" | ".join(cells), flush=True)


def largest_error(corpora: np.ndarray, weights: Weights) -> float:
    """Return the largest |count - share x prefix|, in samples."""
    prefixes = np.arange(1, len(corpora) + 1)
    return max(
        np.abs(np.cumsum(corpora == index) - prefixes * weight / sum(weights)).max()
        for index, weight in enumerate(weights)
    )


def by_mjax(weights: Weights, length: int) -> np.ndarray:
    return mixture.places(np.arange(length), weights)[0]


def by_grain(weights: Weights, length: int) -> np.ndarray:
    """Mix corpora that hold nothing but their own index."""
    corpora = [
        grain.MapDataset.source([index] * length) for index in range(len(weights))
    ]
    mixed = grain.MapDataset.mix(corpora, weights=list(weights))
    # Grain ends where a corpus does; within a period each has enough samples.
    return np.array([mixed[number] for number in range(length)])


def by_largest_deficit(weights: Weights, length: int) -> np.ndarray:
    shares, counts = np.array(weights) / sum(weights), np.zeros(len(weights))
    order = np.empty(length, np.int64)
    for number in range(length):
        order[number] = np.argmax(shares * max(number, 1) - counts)
        counts[order[number]] += 1
    return order


if __name__ == "__main__":
    main()
