"""Compare the engine with a bare decode loop: tokens per second, in pairs.

    python -m scripts.generate.decode_speed [--write]

The bare loop is written for one architecture only: plain JAX, parameters of each layer
in a list, caches in a donated buffer, greedy, all tokens in one `lax.scan`, one
position for all rows; it can neither stop nor accept another request in between. Its
form is the fastest of those tried on a CPU (2026-11): activations [rows, 1, D] and
output projections [N x H, D], without which weights and caches are copied in each step;
caches updated by slices, which one position for all allows. Both sides read the same
weights, start from the same prompts, and must draw the same tokens. Rounds alternate,
so that both see the same disturbances.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mjax.data.tokenizers import BytesTokenizer
from mjax.generate.engine import Engine
from mjax.generate.opened import Opened
from mjax.generate.requests import Request, Sampling
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import load_plugin_without_gpu
from mjax.model.config import ModelConfig
from mjax.model.transformer import Transformer
from scripts.evidence import Table, commit, write_page

PROMPT, TOKENS, ROUNDS = 32, 129, 9


def llama(layers: int, d_model: int, heads: int, kv_heads: int) -> ModelConfig:
    """Return a small model of Llama's form."""
    return ModelConfig(
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=d_model * 11 // 4 // 32 * 32,
        vocab_size=4096,
        block="serial",
        norm="rmsnorm",
        activation="swiglu",
    )


CASES = (
    ("8 layers of width 512", llama(8, 512, 8, 4), 1),
    ("8 layers of width 512", llama(8, 512, 8, 4), 8),
    ("4 layers of width 1024", llama(4, 1024, 16, 4), 4),
    ("4 layers of width 128", llama(4, 128, 4, 4), 8),
)


# ------------------------------------------------------------------------ the bare loop


def rms(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def bare_step(
    model: ModelConfig, weights: Any, carry: Any, _: None
) -> tuple[Any, jax.Array]:
    """Run one token per row through the model; return the most likely next ones."""
    caches, tokens, position = carry
    rows, h, eps = tokens.size, model.head_width, model.norm_eps
    angle = position * model.rope_base ** -(jnp.arange(0, h, 2) / h)
    x = weights["embed"][tokens][:, None]
    new = []
    for w, (ck, cv) in zip(weights["layers"], caches, strict=True):
        y = rms(x, w["norm_attention"], eps)
        q = rotate(jnp.einsum("btd,dnh->btnh", y, w["wq"]), angle)
        k = rotate(jnp.einsum("btd,dkh->btkh", y, w["wk"]), angle)
        v = jnp.einsum("btd,dkh->btkh", y, w["wv"])
        k, v = (a.reshape(rows, -1, 1, h) for a in (k, v))
        ck = jax.lax.dynamic_update_slice_in_dim(ck, k, position, 2)
        cv = jax.lax.dynamic_update_slice_in_dim(cv, v, position, 2)
        new.append((ck, cv))
        grouped = q.reshape(rows, k.shape[1], -1, h)
        scores = jnp.einsum("bkgh,bksh->bkgs", grouped, ck) * h**-0.5
        scores = jnp.where(jnp.arange(ck.shape[2]) > position, -jnp.inf, scores)
        out = jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(scores), cv)
        x = x + out.reshape(rows, 1, -1) @ w["wo"]
        y = rms(x, w["norm_mlp"], eps)
        x = x + (jax.nn.silu(y @ w["w_gate"]) * (y @ w["w_in"])) @ w["w_out"]
    x = rms(x, weights["norm"], eps)
    logits = jnp.einsum("btd,vd->btv", x, weights["head"])[:, 0, : model.vocab_size]
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    return (new, tokens, position + 1), tokens


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def bare_loop(model: ModelConfig, weights: Any, carry: Any, num: int) -> Any:
    """Draw tokens, all in one program."""
    return jax.lax.scan(functools.partial(bare_step, model, weights), carry, None, num)


def bare_weights(params: Any, layers: int) -> Any:
    """Split the parameters into the form of the bare loop."""
    attention = params["blocks"]["attention"]
    out = attention["wo"]
    flat = {
        **attention,
        "wo": out.reshape(layers, -1, out.shape[-1]),
        **params["blocks"]["mlp"],
        "norm_attention": params["blocks"]["norm_attention"]["scale"],
        "norm_mlp": params["blocks"]["norm_mlp"]["scale"],
    }
    return {
        "embed": params["embed"]["table"],
        "head": params["head"]["table"],
        "norm": params["final_norm"]["scale"],
        "layers": [{n: x[i] for n, x in flat.items()} for i in range(layers)],
    }


class Bare:
    """The bare loop with its prompts read, token by token."""

    def __init__(self, model: ModelConfig, params: Any, prompts: np.ndarray) -> None:
        self.model, self.prompts = model, prompts
        self.weights = bare_weights(params, model.layers)

    def run(self) -> tuple[np.ndarray, float]:
        """Return the tokens after the prompts, and the seconds that drawing took."""
        model, rows = self.model, self.prompts.shape[0]
        shape = (rows, model.num_kv_heads, PROMPT + TOKENS, model.head_width)
        caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(model.layers)]
        carry: Any = (caches, jnp.zeros(rows, jnp.int32), jnp.int32(0))
        for column in self.prompts.T:
            carry = (carry[0], jnp.asarray(column), carry[2])
            carry, _ = bare_loop(model, self.weights, carry, 1)
        first = np.asarray(carry[1])
        jax.block_until_ready(carry)
        started_s = time.perf_counter()
        _, drawn = bare_loop(model, self.weights, carry, TOKENS - 1)
        drawn = np.asarray(drawn)
        return np.vstack([first, drawn]).T, time.perf_counter() - started_s


# --------------------------------------------------------------------------- the engine


class Ours:
    """The engine with the same prompts."""

    def __init__(self, model: ModelConfig, params: Any, prompts: np.ndarray) -> None:
        mesh = build_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1))
        opened = Opened(
            name="random",
            model=model,
            params=params,
            mesh=mesh,
            tokenizer=_Clipped(model.vocab_size),  # making text is part of the time
            chat_template=None,
            seq_len=PROMPT + TOKENS,
            end_ids=(),
        )
        self.engine = Engine(opened, slots=len(prompts), max_len=PROMPT + TOKENS)
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
        self.requests = [
            Request(prompt=tuple(int(t) for t in row), sampling=sampling)
            for row in prompts
        ]

    def run(self) -> tuple[np.ndarray, float]:
        """Return the tokens after the prompts, and the seconds that drawing took."""
        engine = self.engine
        for request in self.requests:
            engine.submit(request)
        tokens: dict[int, list[int]] = {}
        reading_s = [0.0]
        admit = engine._admit

        def timed(*args: Any) -> Any:
            began_s = time.perf_counter()
            event = admit(*args)
            reading_s[0] += time.perf_counter() - began_s
            return event

        engine._admit = timed  # type: ignore[method-assign]
        started_s = time.perf_counter()
        while not engine.is_idle:
            for event in engine.step():
                assert event.token is not None
                tokens.setdefault(event.request_id, []).append(event.token)
        wall_s = time.perf_counter() - started_s - reading_s[0]
        engine._admit = admit  # type: ignore[method-assign]
        return np.array([tokens[i] for i in sorted(tokens)]), wall_s


class _Clipped(BytesTokenizer):
    """A byte tokenizer that accepts larger ids."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def decode(self, ids: Any) -> str:
        return super().decode(ids & 255)


# --------------------------------------------------------------------------- comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Results of one case."""

    name: str
    rows: int
    ours_per_s: float
    bare_per_s: float
    ratios: list[float]
    num_unlike: int
    """Tokens in which the two differ; a tie in float32 may be broken otherwise."""


def measure(name: str, model: ModelConfig, rows: int, rounds: int) -> Result:
    """Run both in turn."""
    drawn = Transformer(model, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(drawn))
    rng = np.random.default_rng(0)
    prompts = rng.integers(model.vocab_size, size=(rows, PROMPT)).astype(np.int32)
    sides = Ours(model, params, prompts), Bare(model, params, prompts)
    tokens = [side.run()[0] for side in sides]  # compiles
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            seconds[which].append(sides[which].run()[1])
    num = rows * (TOKENS - 1)
    return Result(
        name=name,
        rows=rows,
        ours_per_s=num / statistics.median(seconds[0]),
        bare_per_s=num / statistics.median(seconds[1]),
        ratios=[b / a for a, b in zip(*seconds, strict=True)],
        num_unlike=int((tokens[0] != tokens[1]).sum()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--case", type=int, help="only this one, counted from 0")
    args = parser.parse_args()
    load_plugin_without_gpu()
    results = []
    cases = CASES if args.case is None else CASES[args.case : args.case + 1]
    for name, model, rows in cases:
        results.append(measure(name, model, rows, args.rounds))
        print(*row(results[-1]), sep=" | ", flush=True)
    if args.write:
        write(results)


def row(r: Result) -> list[str]:
    """Return the cells of a case."""
    return [
        r.name,
        str(r.rows),
        f"{r.ours_per_s:.0f}",
        f"{r.bare_per_s:.0f}",
        f"{statistics.median(r.ratios):.2f}",
        f"{min(r.ratios):.2f} to {max(r.ratios):.2f}",
        str(r.num_unlike),
    ]


def write(results: list[Result]) -> None:
    """Write the page."""
    text = (
        f"Greedy, float32, {TOKENS - 1} tokens after the first, at commit {commit()}. "
        "Ratio: tokens a second of the engine over those of the bare loop, median and "
        f"range of {len(results[0].ratios)} pairs of runs. The engine also makes text, "
        "looks for ends, and gives each text a position of its own; the bare loop "
        "draws all tokens in one program, at one position for all."
    )
    header = ["model", "texts at once", "engine, tokens/s", "bare loop, tokens/s"]
    header += ["ratio", "range", "tokens that differ"]
    table = Table(
        title="Tokens a second",
        text=text,
        header=header,
        rows=[row(r) for r in results],
    )
    command = "python -m scripts.generate.decode_speed --write"
    write_page("generate_speed", "Generation against a bare loop", command, [table])


if __name__ == "__main__":
    main()
