"""Many short trainings of one model with one compiled step.

Input: a program, initial parameters and chats. Output: the loss on other chats after
each pass. The learning rate is an argument of the compiled pass: the updates of the
trainer's AdamW are proportional to it, so one compilation serves a grid.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.optim import OptimConfig
from mjax.data.chat_samples import ANSWER, END, ChatSamples, chat_starts, group_chats
from mjax.data.chat_template import ChatTemplate
from mjax.data.chats import encode_chat, read_chat
from mjax.data.samples import NO_TARGET
from mjax.data.tokenizers import BytesTokenizer
from mjax.step import optim
from mjax.step.program import BATCH_FIELDS, Program

Batches = dict[str, np.ndarray]
"""Shape of each field: [number of batches, B, T]."""
UNIT = OptimConfig(
    name="adamw", lr=1.0, schedule="constant", warmup_steps=10, weight_decay=0.0
)
"""The optimizer of every run; its updates are multiplied by the learning rate."""
_FOREVER = 10**6
_PATIENCE = 5


def samples_of(chats: Sequence[Mapping[str, Any]], template: str, seq_len: int) -> Any:
    """Return chats as the trainer's samples, packed, each isolated from the others."""
    tokenizer = BytesTokenizer()
    eos = tokenizer.decode(np.array([tokenizer.eos_id]))
    read = ChatTemplate(text=template, eos_token=eos)
    ids, flags = [], []
    for number, record in enumerate(chats, start=1):
        found, is_answer, _ = encode_chat(
            read_chat(record, read, f"chat {number}"), tokenizer
        )
        marks = np.where(is_answer, ANSWER, 0).astype(np.uint8)
        marks[-1] |= END
        ids.append(found.astype(np.uint16))
        flags.append(marks)
    stream, marks = np.concatenate(ids), np.concatenate(flags)
    starts = chat_starts(marks)
    groups = group_chats(starts, seq_len, packed=True, skip_longer=False)
    return ChatSamples(
        stream, marks, starts, groups, seq_len, tokenizer.eos_id, isolate_documents=True
    )


def batches_of(
    samples: ChatSamples, order: np.ndarray, size: int, *, padded: bool = False
) -> Batches:
    """Return batches of samples in an order.

    Args:
      samples: to take them from.
      order: indices.
      size: B.
      padded: fill the last batch with rows without targets; if false, an incomplete
        batch is dropped.
    """
    num = -(-len(order) // size) if padded else len(order) // size
    taken = np.resize(order, num * size)
    rows = samples.rows(taken)
    rows["targets"][len(order) :] = NO_TARGET
    return {n: rows[n].reshape(num, size, -1) for n in BATCH_FIELDS}


def unigram_loss(training: np.ndarray, held_out: np.ndarray) -> float:
    """Return nats per token of a unigram model.

    Args:
      training: targets that are counted, plus one for each token.
      held_out: targets that are predicted.
    """
    size = BytesTokenizer.vocab_size
    counts = np.bincount(training[training != NO_TARGET], minlength=size) + 1
    losses = -np.log(counts / counts.sum())
    return float(losses[held_out[held_out != NO_TARGET]].mean())


@dataclasses.dataclass(frozen=True)
class Curve:
    """Loss after each pass over the chats, in nats a token of the answers."""

    training: list[float]
    """Mean over the steps of the pass."""
    validation: list[float]
    """The first is that of the initial parameters."""

    @property
    def best(self) -> int:
        """Number of passes with the least validation loss."""
        return int(np.argmin(self.validation))


class Trainings:
    """One program, compiled once, for many trainings."""

    def __init__(self, program: Program) -> None:
        """Compile nothing yet."""
        self._program = program
        trained, params = program.trained, program.abstract_state.params
        everywhere = jax.tree.map(lambda _: True, trained.of(params))
        tx = optim.build_optimizer(
            UNIT, num_steps=_FOREVER, stacked=everywhere, decayed=everywhere
        )

        rng = jax.random.key_data(jax.random.key(0))  # there is no dropout

        def one(lr: Any, carry: Any, batch: Any) -> Any:
            params, opt_state, step = carry
            loss, _, grads = program.gradients(params, rng, step, batch)
            before = trained.of(params)
            updates, opt_state = tx.update(grads, opt_state, before)
            after = jax.tree.map(lambda p, u: p + lr * u, before, updates)
            return (trained.put(after, params), opt_state, step + 1), loss

        def one_pass(lr: Any, carry: Any, batches: Any) -> Any:
            return jax.lax.scan(lambda c, b: one(lr, c, b), carry, batches)

        def evaluate(params: Any, batches: Any) -> Any:
            found = jax.lax.map(lambda b: program.eval_step(params, b), batches)
            return found["nll"].sum() / found["tokens"].sum()

        self._start = lambda params: tx.init(trained.of(params))
        self._one_pass, self._evaluate = jax.jit(one_pass), jax.jit(evaluate)

    def loss(self, params: Any, batches: Batches) -> float:
        """Return nats a token of the answers."""
        return float(self._evaluate(params, batches))

    def train(
        self,
        params: Any,
        samples: ChatSamples,
        validation: Batches,
        *,
        lr: float,
        passes: int,
        seed: int,
        batch_size: int,
    ) -> tuple[Curve, Any]:
        """Train until the validation loss has not fallen for five passes.

        Args:
          params: initial.
          samples: to train on.
          validation: chats that choose the number of passes.
          lr: peak learning rate, constant after the warm-up.
          passes: maximum number.
          seed: of the order.
          batch_size: B.
        Returns:
          The curve, and the parameters where the validation loss was least.
        """
        carry = params, self._start(params), jnp.int32(0)
        curve, best = Curve([], [self.loss(params, validation)]), params
        order = np.random.default_rng(seed)
        for number in range(1, passes + 1):
            batches = batches_of(samples, order.permutation(len(samples)), batch_size)
            carry, losses = self._one_pass(jnp.float32(lr), carry, batches)
            curve.training.append(float(losses.mean()))
            curve.validation.append(self.loss(carry[0], validation))
            if curve.best == number:
                best = carry[0]
            if number - curve.best >= _PATIENCE:
                break
        return curve, best
