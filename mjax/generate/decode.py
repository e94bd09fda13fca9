"""The two programs of generation: prefill a prompt, and draw the tokens after it.

Input: an opened model. Output: jitted functions on a state of fixed shapes, which they
donate: the caches, and the newest token of each slot. Each function is one
`jax.shard_map` over all mesh axes, with slots over dp.

A prompt goes through the blocks as a batch of one sequence, with the attention of
training. Then each step takes one token per slot. The slots take the dim that training
uses for the sequence ([1, slots/tp, D] per device), so projections, norms, embedding
and head are those of training, and only the attention core differs (`generate.cache`).
Layers are unrolled over parameters that are unstacked once, because slicing a stack
would copy each layer for every token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mjax.generate import cache
from mjax.generate.cache import Ring
from mjax.generate.opened import Opened
from mjax.generate.sampling import Draw, Drawn, draw
from mjax.layers.attention import Core
from mjax.mesh import collectives
from mjax.mesh.axes import AXES, DP, PP, TP, AxisSizes
from mjax.mesh.ordering import in_order
from mjax.model.config import ModelConfig
from mjax.model.transformer import Params, Transformer, abstract_params
from mjax.step.state import param_specs

MOST_STEPS = 32
"""Maximum number of tokens per slot that one dispatch draws. The host's cost of a
dispatch is small compared with this many steps of the smallest model."""

_SLOTS = PartitionSpec(DP)
_RING = PartitionSpec(DP, (PP, TP))  # in its type a ring varies over pp, of size 1
_NOWHERE = PartitionSpec()


class Weights(NamedTuple):
    """Parameters in the form that decoding reads."""

    ends: Params
    """Parameters outside the blocks."""
    layers: tuple[Params, ...]
    """Parameters of each block."""


class State(NamedTuple):
    """State on the devices between two calls."""

    rings: tuple[Ring, ...]
    """Ring of each layer."""
    tokens: Int[Array, "slots"]
    """The newest token of each slot, not yet processed by the model."""
    positions: Int[Array, "slots"]
    """Position of the newest token of each slot."""
    how: Draw
    """Sampling options of each slot."""


class Prompt(NamedTuple):
    """Inputs of the prefill besides weights and state."""

    tokens: Int[Array, "1 T"]
    """Padded token ids."""
    length: Int[Array, ""]
    """Number of tokens without padding."""
    slot: Int[Array, ""]
    how: Draw
    """Sampling options, arrays [1]."""
    with_logprobs: Bool[Array, ""]
    """See `sampling.draw`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """The functions of one model for a fixed number of slots."""

    mesh: Mesh
    graph: Any
    """GraphDef of a Transformer."""
    specs: Weights
    """PartitionSpecs of the weights."""
    model: ModelConfig
    num_slots: int
    max_len: int
    """Maximum number of tokens of a prompt and its answer."""
    num_known: int
    """Number of tokens of the tokenizer; further ids of the model are never drawn."""
    dtype: Any
    """Dtype of parameters and caches."""

    def new_state(self) -> State:
        """Create empty slots, born sharded."""
        shape = jax.eval_shape(self._empty)
        shardings = jax.tree.map(
            functools.partial(NamedSharding, self.mesh), self._state_specs(shape)
        )
        return jax.jit(self._empty, out_shardings=shardings)()

    def _empty(self) -> State:
        model, tp = self.model, self.mesh.shape[TP]
        heads = max(model.num_kv_heads, tp)  # heads are repeated if tp is larger
        rings = []
        for kind in model.kinds:
            length = cache.ring_length(kind.window, self.max_len)
            shape = (self.num_slots, heads, length, model.head_width)
            rings.append(
                Ring(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))
            )
        whole = jnp.zeros(self.num_slots, jnp.int32)
        return State(
            rings=tuple(rings),
            tokens=whole,
            positions=whole,
            how=Draw(
                temperature=jnp.zeros(self.num_slots, jnp.float32),
                top_k=jnp.ones(self.num_slots, jnp.int32),
                top_p=jnp.ones(self.num_slots, jnp.float32),
                seed=jnp.zeros(self.num_slots, jnp.uint32),
            ),
        )

    def _state_specs(self, state: State) -> State:
        specs = jax.tree.map(lambda _: _SLOTS, state)
        return specs._replace(rings=jax.tree.map(lambda _: _RING, state.rings))

    # -------------------------------------------------------------------- the programs

    def read(
        self, weights: Weights, state: State, prompt: Prompt
    ) -> tuple[State, Drawn]:
        """Prefill a prompt into a slot and draw the token after it.

        Args:
          weights: weights on the mesh.
          state: state of the slots; donated when jitted.
          prompt: the prompt, padded to a multiple of tp.
        Returns:
          the state, and the draw, [1].
        """

        def per_device(
            weights: Weights, state: State, prompt: Prompt
        ) -> tuple[State, Drawn]:
            weights, state, prompt = jax.tree.map(
                collectives.vary, (weights, state, prompt)
            )
            local = state.tokens.shape[0]
            slot = prompt.slot - collectives.batch_offset(local)
            is_here = (slot >= 0) & (slot < local)
            slot = slot.clip(0, local - 1)
            logits, kept = self._prompt_logits(weights, prompt)
            rings = tuple(
                cache.fill(ring, k, v, length=prompt.length, slot=slot, is_here=is_here)
                for ring, (k, v) in zip(state.rings, kept, strict=True)
            )
            drawn = draw(
                logits,
                prompt.how,
                prompt.length[None],
                with_logprobs=prompt.with_logprobs,
            )

            def put(old: jax.Array, new: jax.Array) -> jax.Array:
                new = jnp.where(is_here, new.astype(old.dtype), old[slot])
                return old.at[slot].set(new)

            state = State(
                rings=rings,
                tokens=put(state.tokens, drawn.token[0]),
                positions=put(state.positions, prompt.length),
                how=Draw(
                    *(put(a, b[0]) for a, b in zip(state.how, prompt.how, strict=True))
                ),
            )
            return self._settled(state), collectives.settle(drawn)

        return self._map(
            per_device,
            (state, prompt),
            out_specs=(self._state_specs(state), _NOWHERE),
        )(weights, state, prompt)

    def advance(
        self,
        weights: Weights,
        state: State,
        num_steps: Int[Array, ""],
        with_logprobs: Bool[Array, ""],
    ) -> tuple[State, Drawn]:
        """Draw the next tokens of all slots, step by step.

        Args:
          weights: weights on the mesh.
          state: state of the slots; donated when jitted.
          num_steps: tokens per slot, at most MOST_STEPS; one program serves all
            numbers.
          with_logprobs: see `sampling.draw`.
        Returns:
          the state, and the draws, [MOST_STEPS, slots]; zeros after num_steps.
        """

        def per_device(
            weights: Weights, state: State, num_steps: Array, with_logprobs: Array
        ) -> tuple[State, Drawn]:
            weights, state, with_logprobs = jax.tree.map(
                collectives.vary, (weights, state, with_logprobs)
            )

            def one(state: State) -> tuple[State, Drawn]:
                logits, rings = self._next_logits(weights, state)
                positions = state.positions + 1
                drawn = draw(logits, state.how, positions, with_logprobs=with_logprobs)
                new = state._replace(
                    rings=rings, tokens=drawn.token, positions=positions
                )
                return new, drawn

            def step(index: Array, carry: tuple[State, Drawn]) -> tuple[State, Drawn]:
                state, drawn = one(carry[0])
                return state, jax.tree.map(
                    lambda rows, x: lax.dynamic_update_index_in_dim(rows, x, index, 0),
                    carry[1],
                    drawn,
                )

            def rows_of(x: Any) -> Array:
                return collectives.vary(jnp.zeros((MOST_STEPS, *x.shape), x.dtype))

            empty = jax.tree.map(rows_of, jax.eval_shape(one, state)[1])
            state, drawn = lax.fori_loop(0, num_steps, step, (state, empty))
            return self._settled(state), collectives.settle(drawn, over_dp=False)

        return self._map(
            per_device,
            (state, num_steps, with_logprobs),
            out_specs=(self._state_specs(state), PartitionSpec(None, DP)),
        )(weights, state, num_steps, with_logprobs)

    def _map(
        self, per_device: Callable[..., Any], args: tuple[Any, ...], *, out_specs: Any
    ) -> Callable[..., Any]:
        specs = [self.specs, self._state_specs(args[0])]
        specs += [jax.tree.map(lambda _: _NOWHERE, arg) for arg in args[1:]]
        is_simulated = self.mesh.size > 1 and jax.default_backend() == "cpu"
        return jax.shard_map(
            in_order(per_device) if is_simulated else per_device,
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=out_specs,
        )

    def _settled(self, state: State) -> State:
        """Return the state with all but the rings marked as equal over tp."""
        settled = collectives.settle(state._replace(rings=()), over_dp=False)
        return settled._replace(rings=state.rings)

    # ---------------------------------------------------------------------- the layers

    def _prompt_logits(
        self, weights: Weights, prompt: Prompt
    ) -> tuple[Float[Array, "1 V"], list[tuple[Array, Array]]]:
        """Return logits after the prompt, and (keys, values) by layer; per device."""
        model = self._bind(weights)

        def keep(
            core: Core, q: Array, k: Array, v: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            return core(q, k, v), (k, v)

        length = prompt.tokens.shape[1]
        positions = collectives.vary(jnp.arange(length)[None])
        context = model.context(positions, None)._replace(cached=keep)
        x, kept = model.start(prompt.tokens, positions), []
        for index, params in enumerate(weights.layers):
            x, one = self._block(model, params).apply(
                x, self.model.kinds[index], context, None
            )
            kept.append(one)
        x = collectives.gather_sequence(x)
        x = lax.dynamic_slice_in_dim(x, prompt.length - 1, 1, axis=1)
        return self._logits(model, x)[:1], kept

    def _next_logits(
        self, weights: Weights, state: State
    ) -> tuple[Float[Array, "slots V"], tuple[Ring, ...]]:
        """Return the logits after the newest tokens, and the new rings; per device."""
        model = self._bind(weights)
        positions = state.positions[None]
        context = model.context(positions, None)
        x, rings = model.start(state.tokens[None], positions), []
        for index, params in enumerate(weights.layers):
            core = functools.partial(
                _attend_to_ring, self.model, state.rings[index], state.positions
            )
            x, ring = self._block(model, params).apply(
                x, self.model.kinds[index], context._replace(cached=core), None
            )
            rings.append(ring)
        return self._logits(model, x), tuple(rings)

    def _logits(
        self, model: Transformer, x: Float[Array, "1 t D"]
    ) -> Float[Array, "T V"]:
        """Return logits of all positions, -inf for ids without a token; per device."""
        logits = collectives.gather_vocab(model.logits_of(x))[0]
        if self.num_known == logits.shape[-1]:
            return logits
        is_known = jnp.arange(logits.shape[-1]) < self.num_known
        return jnp.where(is_known, logits, -jnp.inf)

    def _bind(self, weights: Weights) -> Transformer:
        """Return the model; callers use only the structure of its blocks."""
        return nnx.merge(self.graph, weights.ends | {"blocks": weights.layers[0]})

    def _block(self, model: Transformer, params: Params) -> Any:
        return nnx.merge(nnx.graphdef(model.blocks), params)


def _attend_to_ring(
    model: ModelConfig,
    ring: Ring,
    positions: Array,
    core: Core,
    q: Array,
    k: Array,
    v: Array,
) -> tuple[Array, Ring]:
    """Return attention to the ring, and the ring with the new keys and values.

    It replaces the attention core. The sequence dim of q, k and v holds the slots.
    """
    del core
    ring = cache.append(ring, k[0], v[0], positions)
    out = cache.attend(
        ring,
        q[0],
        positions,
        scale=model.attention_scale,
        soft_cap=model.attn_soft_cap,
    )
    return out[None], ring


def make_decoder(
    opened: Opened, *, num_slots: int, max_len: int
) -> tuple[Decoder, Weights]:
    """Return the decoder of a model, and its parameters unstacked into layers.

    Args:
      opened: the model.
      num_slots: texts continued concurrently; a multiple of dp x tp.
      max_len: maximum number of tokens of a prompt and its answer together.
    """
    mesh = opened.mesh
    sizes = AxisSizes(**{axis: mesh.shape[axis] for axis in AXES})
    graph, abstract = abstract_params(opened.model)
    specs = param_specs(abstract, sizes, shard_over_dp=False)
    ends = {name: spec for name, spec in specs.items() if name != "blocks"}
    one = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs["blocks"])
    decoder = Decoder(
        mesh=mesh,
        graph=graph,
        specs=Weights(ends=ends, layers=(one,) * opened.model.layers),
        model=opened.model,
        num_slots=num_slots,
        max_len=max_len,
        num_known=min(opened.model.vocab_size, opened.tokenizer.vocab_size),
        dtype=opened.params["embed"]["table"].dtype,
    )
    blocks = opened.params["blocks"]
    unstacked = jax.tree.map(
        lambda x, spec: _unstack(x, NamedSharding(mesh, spec)), blocks, one
    )
    is_leaf = functools.partial(_is_layers, opened.model.layers)
    layers = tuple(
        jax.tree.map(lambda of_layers, i=i: of_layers[i], unstacked, is_leaf=is_leaf)
        for i in range(opened.model.layers)
    )
    held = {name: p for name, p in opened.params.items() if name != "blocks"}
    return decoder, Weights(ends=held, layers=layers)


def _unstack(stacked: jax.Array, sharding: NamedSharding) -> list[jax.Array]:
    return jax.jit(list, out_shardings=sharding)(stacked)


def _is_layers(num: int, x: Any) -> bool:
    return isinstance(x, list) and len(x) == num
