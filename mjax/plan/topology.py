"""Fit a run to a described cluster: checks before any compilation.

Input: a config and the user's cluster. Output: the config with the vocabulary size of
its tokenizer and the sizes of the mesh axes, or an error with flags that fit.
"""

from mjax.config.fixes import Devices, sizes_of
from mjax.config.train import TrainConfig, with_tokenizer
from mjax.data.names import trained_vocab_size
from mjax.data.tokenizers import load_tokenizer
from mjax.mesh.axes import AxisSizes
from mjax.plan.options import Topology


def check_plannable(config: TrainConfig, topology: Topology) -> None:
    """Refuse options that train accepts but a plan cannot model.

    Args:
      config: config of the run, as the flags give it.
      topology: the cluster.
    Raises:
      ValueError: idle stages are skipped, or a run may use more memory than the GPU
        has.
    """
    if config.pipeline.idle == "skip":
        raise ValueError(
            "--pipeline.idle skip makes every half-tick of the pipeline conditional, "
            "and the planner does not count how often each one runs; plan with "
            "--pipeline.idle compute, or auto"
        )
    asked, gib = config.device_memory_gib, topology.description.memory_bytes / 2**30
    if asked is not None and asked > gib:
        raise ValueError(
            f"--device-memory-gib must be at most the {gib:.1f} GiB of --gpu "
            f"{topology.gpu}, got {asked:g}; give less, or leave it out"
        )


def settle(config: TrainConfig, topology: Topology) -> tuple[TrainConfig, AxisSizes]:
    """Check that a run fits a cluster; no corpus is read and no device touched.

    Args:
      config: config of the run, as the flags give it.
      topology: the cluster; the mesh uses all of it.
    Returns:
      The config with the vocabulary of its tokenizer (the requested size if it is not
      trained yet), and the sizes of the mesh axes.
    Raises:
      ValueError: the mesh does not fill the cluster, a tensor-parallel group leaves its
        node, a size does not divide, or the tokenizer cannot be read.
    """
    config = with_vocabulary(config)
    per_node = topology.gpus_per_node
    devices = Devices(
        count=topology.num_gpus, flag="nodes", per_flag=per_node, per_host=per_node
    )
    return config, sizes_of(config, devices)


def with_vocabulary(config: TrainConfig) -> TrainConfig:
    """Return the config with its vocabulary size, without reading a corpus.

    Args:
      config: config of the run. If the run trains a tokenizer, it is assumed to reach
        the requested size.
    Raises:
      ValueError: the tokenizer cannot be read, or the model's vocabulary is too small.
    """
    data = config.data
    if config.init_from and (data.tokenizer, data.vocab) == (None, "tokenizer"):
        raise ValueError(
            f"a plan does not read --init-from {config.init_from}, whose vocabulary "
            "the run takes; give it as --data.vocab model --model.vocab-size N (python "
            "-m mjax.ckpt show prints N)"
        )
    num_tokens = trained_vocab_size(data.tokenizer_name)
    if num_tokens is None:
        tokenizer = load_tokenizer(data.tokenizer_name, eos_token=data.eos_token)
        num_tokens = tokenizer.vocab_size
    return with_tokenizer(config, num_tokens)
