import numpy as np

from mjax.data.dataset import DataConfig, open_dataset
from mjax.data.synthetic import STRIDES


def synthetic(seed: int):
    return open_dataset(DataConfig(path=("synthetic",), seq_len=64), seed=seed)


def test_the_synthetic_chain_has_the_stated_entropy():
    rows = synthetic(0).train.rows(np.arange(200))
    steps = (rows["targets"] - rows["tokens"]) % 256
    values, counts = np.unique(steps, return_counts=True)
    assert values.tolist() == sorted(STRIDES)
    # 12800 draws: the standard deviation of a share is 0.004.
    np.testing.assert_allclose(counts / counts.sum(), 0.25, atol=0.02)
    assert (rows["tokens"][:, 1:] == rows["targets"][:, :-1]).all()


def test_synthetic_samples_depend_on_seed_index_and_side_alone():
    one, same, other = synthetic(3), synthetic(3), synthetic(-4)
    tokens = one.train[5]["tokens"]
    assert (tokens == same.train.rows(np.array([9, 5]))["tokens"][1]).all()
    assert (tokens != other.train[5]["tokens"]).any()
    assert (tokens != one.train[6]["tokens"]).any()
    assert (tokens != one.held_out[5]["tokens"]).any()
    assert one.fingerprint == same.fingerprint != other.fingerprint
