"""A run is fitted to a cluster without a corpus; what is compiled is what it takes."""

import pytest

from mjax.config.command_line import parse
from mjax.plan.compile import compilable
from mjax.plan.options import Topology
from mjax.plan.topology import settle
from mjax.recipes import RECIPES
from tests.plan.plans import settled


@pytest.mark.parametrize(
    ("flags", "vocab_size"),
    [
        ("--recipe debug", 257),
        ("--recipe gpt-125m", 32_768),
        ("--recipe gpt-125m --data.tokenizer train:512", 512),
        ("--recipe megascale-175b --mesh.pp 1 --batch.size 768", 64_000),
    ],
)
def test_the_vocabulary_is_known_without_a_corpus(flags, vocab_size):
    config, _, _ = settled(f"{flags} --data.path /absent", nodes=1)
    assert config.model.vocab_size == vocab_size


def test_the_mesh_takes_the_whole_cluster():
    _, sizes, topology = settled("--recipe gpt-tp8 --mesh.dp-shard 2", nodes=4)
    assert sizes.num_devices == topology.num_gpus == 32
    assert (sizes.dp_replicate, sizes.dp_shard, sizes.tp) == (2, 2, 8)


def test_tp_may_leave_its_node_if_the_user_says_so():
    flags = "--recipe debug --mesh.tp 8 --mesh.tp-across-hosts"
    config = parse(flags.split(), RECIPES, "prog")[0]
    topology = Topology(gpu="h100", nodes=2, gpus_per_node=4)
    assert settle(config, topology)[1].tp == 8


@pytest.mark.parametrize(
    ("gpu", "flags", "backend", "is_named"),
    [
        ("h200", "", "auto", False),
        ("h200", "--data.no-isolate-documents", "auto", False),
        ("h200", "--data.no-isolate-documents --model.heads 8", "mosaic_gpu", True),
        ("a100-80g", "--data.no-isolate-documents", "blocked", True),
        ("a100-80g", "", "auto", False),
        ("h200", "--model.attention blocked", "blocked", False),
    ],
)
def test_only_cudnn_is_replaced_and_the_page_says_so(gpu, flags, backend, is_named):
    config, _, topology = settled(f"--recipe gpt-125m {flags}", nodes=1, gpu=gpu)
    found, notes = compilable(config, topology)
    assert found.model.attention == backend
    assert ("cuDNN" in " ".join(notes)) == is_named


def test_an_attention_that_the_gpu_does_not_have_is_refused():
    flags = "--recipe gpt-125m --model.attention mosaic_gpu"
    config, _, topology = settled(flags, nodes=1, gpu="a100-80g")
    with pytest.raises(ValueError, match="the GPU must be of generation hopper"):
        compilable(config, topology)
