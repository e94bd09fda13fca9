import numpy as np

from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.samples import Samples
from mjax.data.synthetic import STRIDES


def synthetic(seed: int):
    return open_dataset(DataConfig(path=("synthetic",), seq_len=64), seed=seed)


def samples(seed: int, side: str = "train") -> Samples:
    return getattr(synthetic(seed), side).corpora[0]


def test_the_synthetic_chain_has_the_stated_entropy():
    rows = samples(0).rows(np.arange(200))
    steps = (rows["targets"] - rows["tokens"]) % 256
    values, counts = np.unique(steps, return_counts=True)
    assert values.tolist() == sorted(STRIDES)
    # 12800 draws: the standard deviation of a share is 0.004.
    np.testing.assert_allclose(counts / counts.sum(), 0.25, atol=0.02)
    assert (rows["tokens"][:, 1:] == rows["targets"][:, :-1]).all()


def test_synthetic_samples_depend_on_seed_index_and_side_alone():
    tokens = samples(3)[5]["tokens"]
    assert (tokens == samples(3).rows(np.array([9, 5]))["tokens"][1]).all()
    assert (tokens != samples(-4)[5]["tokens"]).any()
    assert (tokens != samples(3)[6]["tokens"]).any()
    assert (tokens != samples(3, "held_out")[5]["tokens"]).any()
    one, same, other = synthetic(3), synthetic(3), synthetic(-4)
    assert one.fingerprint == same.fingerprint != other.fingerprint
