"""Every recipe is a valid run of the size it says."""

import inspect
import re

import pytest

from mjax import recipes
from mjax.config.command_line import parse
from mjax.config.sizes import check_sizes
from mjax.config.train import TrainConfig, from_json, to_json
from mjax.hugging_face.families import hf_config
from mjax.hugging_face.nearest import describe
from mjax.mesh.axes import AxisSizes, resolve
from mjax.model.counts import num_params

EXPECTED_PARAMS = {
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-1b3": 1.3e9,
    "gpt-13b": 13e9,
    "llama3-8b": 8e9,
    "megascale-175b": 175e9,
    "megascale-530b": 530e9,
}


def closed_formula(config: TrainConfig) -> int:
    """Count parameters from sizes alone.

    Per layer: q, k, v and attention output; two matrices of the feed-forward (three
    with a gate), a bias for the outputs of each; the scale of one norm in a parallel
    block, of two in a serial one, and their biases. Besides: embedding, output
    projection and its bias, final norm.
    """
    model = config.model
    assert not model.attn_bias
    d, n = model.d_model, model.heads
    k = n if model.kv_heads is None else model.kv_heads
    h = d // n if model.head_dim is None else model.head_dim
    f = 4 * d if model.d_ff is None else model.d_ff
    multiple = model.vocab_multiple
    vocab = (model.vocab_size + multiple - 1) // multiple * multiple
    attention = d * (n + 2 * k) * h + n * h * d
    matrices = 3 if model.activation == "swiglu" else 2
    feed_forward = matrices * d * f
    if model.mlp_bias:
        feed_forward += (matrices - 1) * f + d
    norm = d * (2 if model.norm_bias else 1)
    ends = vocab * d * (1 if model.tie_embeddings else 2) + norm
    ends += vocab if model.head_bias else 0
    norms = (1 if model.block == "parallel" else 2) * norm
    return model.layers * (attention + feed_forward + norms) + ends


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_parameter_count_follows_the_formula(name: str):
    config = recipes.RECIPES[name]()
    assert num_params(config.model) == closed_formula(config)


@pytest.mark.parametrize("name", EXPECTED_PARAMS)
def test_a_recipe_has_the_size_in_its_name(name: str):
    """Within 9%: names are rounded, and count another vocabulary than ours."""
    expected = EXPECTED_PARAMS[name]
    assert closed_formula(recipes.RECIPES[name]()) == pytest.approx(expected, rel=0.09)


@pytest.mark.parametrize(
    ("name", "layers", "d_model", "heads"),
    [
        ("gpt-125m", 12, 768, 12),
        ("gpt-350m", 24, 1024, 16),
        ("gpt-1b3", 24, 2048, 16),
        ("gpt-13b", 40, 5120, 40),
        ("llama3-8b", 32, 4096, 32),
        ("megascale-175b", 96, 12_288, 128),
        ("megascale-530b", 105, 20_480, 160),
    ],
)
def test_the_published_shapes(name: str, layers: int, d_model: int, heads: int):
    model = recipes.RECIPES[name]().model
    assert (model.layers, model.d_model, model.heads) == (layers, d_model, heads)


def test_llama_has_the_parameters_of_the_released_model():
    """8,030,261,248, as the weights that Meta released count."""
    model = recipes.llama3_8b().model
    assert num_params(model) == 8_030_261_248
    sizes = (model.num_kv_heads, model.ffn_width, model.padded_vocab)
    assert sizes == (8, 14_336, 128_256)
    kind = (model.block, model.norm, model.activation, model.rope_base)
    assert kind == ("serial", "rmsnorm", "swiglu", 500_000.0)


def test_megascale_keeps_its_vocabulary_and_sequence():
    for recipe in (recipes.megascale_175b, recipes.megascale_530b):
        config = recipe()
        assert (config.model.vocab_size, config.data.vocab) == (64_000, "model")
        assert config.data.seq_len == 2048


def test_megascale_has_the_techniques_of_the_paper():
    """Section 3.1; the size of the window is ours."""
    for recipe in (recipes.megascale_175b, recipes.megascale_530b):
        config = recipe()
        assert config.model.block == "parallel"
        assert config.model.window == (1024,)
        assert config.optim.name == "lamb"


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "gpus", "rows"),
    [
        ("megascale-175b", 8, 6, (256, 512, 1024), 1),
        ("megascale-530b", 35, 3, (2240,), 2),
    ],
)
def test_megascale_has_the_layout_of_the_paper(
    name: str, pp: int, chunks: int, gpus: tuple[int, ...], rows: int
):
    config = recipes.RECIPES[name]()
    layout = (config.mesh.tp, config.mesh.pp, config.pipeline.chunks, config.zero)
    assert layout == (8, pp, chunks, 2)
    for num_devices in gpus:
        check_sizes(config, resolve(config.mesh, num_devices))
    local_size = config.batch.size // resolve(config.mesh, gpus[-1]).dp
    assert local_size == rows * config.batch.microbatches


def test_debug_divides_over_eight_devices_any_way():
    config = recipes.debug()
    for tp in (1, 2, 4, 8):
        check_sizes(config, AxisSizes(pp=1, dp_replicate=1, dp_shard=8 // tp, tp=tp))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("debug", "cohere2"),
        ("demo", "cohere2"),
        ("gpt-125m", "gptj"),
        ("gpt-350m", "gptj"),
        ("gpt-1b3", "gptj"),
        ("gpt-13b", "gptj"),
        ("llama3-8b", "llama"),
        ("megascale-175b", None),
        ("megascale-530b", None),
    ],
)
def test_a_recipe_has_a_form_of_hugging_face_or_says_that_it_has_none(
    name: str, family: str | None
):
    config, doc = recipes.RECIPES[name](), inspect.getdoc(recipes.RECIPES[name]) or ""
    keeps = " ".join(doc.split()).count("paper's form: no export to Hugging Face")
    line = describe(config.model, config.data.seq_len)
    if family is None:
        assert keeps
        assert (line or "").startswith("export: this model has no Hugging Face form")
    else:
        assert not keeps
        assert line is None
        chosen, _ = hf_config(config.model, seq_len=config.data.seq_len)
        assert chosen.name == family


def test_the_demo_ties_its_embeddings_as_vllm_wants_it_of_cohere2():
    assert recipes.demo().model.tie_embeddings


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_fits_on_one_node_a_stage(name: str):
    config = recipes.RECIPES[name]()
    check_sizes(config, resolve(config.mesh, 8 * config.mesh.pp))


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_named_as_its_function_and_says_how_to_run_it(name: str):
    recipe = recipes.RECIPES[name]
    assert recipe.__name__ == name.replace("-", "_")
    doc = inspect.getdoc(recipe) or ""
    command = re.search(r"^Command: python -m mjax\.train(.*)$", doc, re.MULTILINE)
    assert command
    assert parse(command[1].split(), recipes.RECIPES, "prog")[1].recipe == name
    assert "Hardware: " in doc
    assert re.search(r"Expect: |no\s+loss is claimed", doc)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_survives_json_and_the_command_line(name: str):
    config = recipes.RECIPES[name]()
    assert from_json(to_json(config)) == config
    assert parse(["--recipe", name], recipes.RECIPES, "prog")[0] == config
