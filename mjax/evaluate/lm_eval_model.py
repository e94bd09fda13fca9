"""A model for lm-eval: log-likelihoods and answers of texts.

Input: `--model_args`, then requests of tasks. Output: log-likelihoods and texts. Texts
become tokens and windows as in lm-eval's model `hf`, so that both can be compared: the
tokenizer adds its tokens before a text, names of special tokens are tokens, and a
context that is too long is truncated on the left. Differs: a chat is tokenized in the
parts that training has, which end where an answer begins.

Source: lm-eval 0.4.13, `lm_eval/models/huggingface.py` and `lm_eval/api/model.py`.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

from mjax.data import chats
from mjax.data.samples import NO_TARGET
from mjax.evaluate import loss
from mjax.evaluate.lm_eval_args import (
    Args,
    BadArgsError,
    read_args,
    read_sampling,
    seeds_of,
)
from mjax.evaluate.opening import length_of, open_on_mesh, run_of
from mjax.evaluate.scoring import Scorer
from mjax.evaluate.windows import Window
from mjax.generate.engine import Engine, answer_all
from mjax.generate.opened import Opened
from mjax.generate.requests import Request
from mjax.mesh.axes import MeshConfig
from mjax.model.counts import num_params

_SLOTS = 8
"""Concurrent answers if no batch size is given. Not measured."""

Tokens = list[int]
Scored = tuple[float, bool]
"""Log-likelihood in nats, and whether every token is the likeliest."""
_log = logging.getLogger(__name__)


class MjaxLM(TemplateLM):
    """A run, a checkpoint or a Hugging Face folder."""

    def __init__(self, **words: Any) -> None:
        """Open the model; the arguments are the fields of `--model_args`.

        Raises:
          BadArgsError: bad input.
          RuntimeError: files are missing or damaged.
        """
        super().__init__()
        self._args = read_args(words)
        try:
            run = run_of(self._args.model, self._args.step)
            self._precision = run.precision(self._args.dtype)
            self._is_folder = run.config is None
            self._opened = open_on_mesh(
                self._args.model,
                precision=self._precision,
                step=self._args.step,
                tokenizer=self._args.tokenizer,
                mesh=MeshConfig(tp=self._args.tp, dp=self._args.dp),
                simulated=self._args.simulate_devices,
            )
            self.max_length = length_of(
                run, self._opened, self._args.max_length, flag="max_length"
            )
            self._scorer: Scorer = loss.make_scorer(
                self._opened.model,
                self._opened.params,
                self._opened.mesh,
                length=self.max_length,
                batch_size=_rows(self._args, self._opened),
            )
        except BadArgsError:
            raise
        except ValueError as error:
            raise BadArgsError(str(error)) from error
        self._engine: Engine | None = None
        self._logged: set[str] = set()
        self._starts: dict[str, list[int]] = {}
        """Text of a chat -> places at which an answer begins; see `encode_parts`."""

    # ------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._opened.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Context of a text that has none: the bos token, if any, or the eos token."""
        bos = self._opened.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> Tokens:
        """Return the tokens of a text; None adds start tokens if the text has none."""
        return self._encode(string, self._starts.get(string, ()), add_special_tokens)

    def _encode(
        self,
        string: str,
        starts: Sequence[int],
        add_special_tokens: bool | None = None,
    ) -> Tokens:
        ids = chats.encode_parts(string, starts, self._opened.tokenizer)[0].tolist()
        if add_special_tokens is None:
            begins = string.startswith(self._name_of(self.prefix_token_id))
            add_special_tokens = not begins
        return [*self._opened.start_ids, *ids] if add_special_tokens else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """Tokenize a context and its continuation; a chat is cut as in training."""
        starts = self._starts.get(context)
        if starts is None:
            return super()._encode_pair(context, continuation)
        before = self._encode(context, starts)
        return before, self._encode(context + continuation, starts)[len(before) :]

    def _name_of(self, token: int) -> str:
        return self._opened.tokenizer.decode(np.array([token]))

    # ---------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Tokens, Tokens]], **unused: Any
    ) -> list[Scored]:
        """Score continuations, which lm-eval's own method has tokenized."""
        windows = [self._window(text, *tokens) for text, *tokens in requests]
        scores = list(self._scorer(windows))
        found = []
        for (text, _, _), window, score in zip(requests, windows, scores, strict=True):
            is_scored = window.targets != NO_TARGET
            is_greedy = bool((score.best == window.targets)[is_scored].all())
            found.append((-score.total, is_greedy))
            if isinstance(text, tuple):  # it is None for part of a longer text
                self.cache_hook.add_partial("loglikelihood", text, found[-1])
        return found

    def _window(self, text: Any, context: Tokens, continuation: Tokens) -> Window:
        """Return the last tokens that fit; only the continuation is scored."""
        if not 0 < len(continuation) <= self.max_length:
            raise BadArgsError(
                f"a continuation must have 1 to {self.max_length} tokens, the length "
                f"of the model (max_length), got {len(continuation)}: {text!r:.200}"
            )
        tokens = np.array([*context, *continuation][-self.max_length - 1 :], np.int32)
        targets = tokens[1:].copy()
        targets[: len(targets) - len(continuation)] = NO_TARGET
        return Window(tokens=tokens[:-1], targets=targets)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each complete text; score each token once."""
        parts: list[tuple[None, Tokens, Tokens]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            # As in `hf`, start tokens that the tokenizer of a folder adds are scored.
            adds = None if self._is_folder else False
            cut = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], adds),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in cut:
                parts.append((None, *utils.make_disjoint_window(pair)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(parts)
        for index, (score, _) in zip(owners, scores, strict=True):
            totals[index] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ------------------------------------------------------------------------ answers

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Continue texts, each up to a stop text or its number of tokens."""
        if self._engine is None:
            slots = self._args.batch_size or _SLOTS
            self._engine = Engine(self._opened, slots=slots, max_len=self.max_length)
        pairs = [request.args for request in requests]
        seeds = seeds_of(pairs, self._args.seed)
        asked = [
            self._request(context, options, seed)
            for (context, options), seed in zip(pairs, seeds, strict=True)
        ]
        answers = answer_all(self._engine, asked)
        texts = [answer.text for answer in answers]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _request(self, context: str, options: Mapping[str, Any], seed: int) -> Request:
        sampling, notes = read_sampling(options, max_tokens=self._args.max_gen_toks)
        for note in notes:
            if note not in self._logged:
                _log.warning("generation options of the task: %s", note)
            self._logged.add(note)
        room = self.max_length - sampling.max_tokens
        if room < 1:
            raise BadArgsError(
                f"the task needs answers of {sampling.max_tokens} tokens, but the "
                f"model takes {self.max_length} including the prompt; give fewer with "
                "--gen_kwargs max_gen_toks=N or max_gen_toks=N in --model_args"
            )
        prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return Request(
            prompt=tuple(prompt), sampling=dataclasses.replace(sampling, seed=seed)
        )

    # ----------------------------------------------------------------- chats and facts

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's template, which lm-eval adds to its results."""
        template = self._opened.chat_template
        return template.text if chat_template and template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as text; without a generation prompt, the last stays open.

        Raises:
          BadArgsError: the model has no template, or the template refuses the messages.
        """
        template = self._opened.chat_template
        if template is None:
            raise BadArgsError(
                f"{self._opened.name} has no chat template; leave out "
                "--apply_chat_template"
            )
        try:
            text, starts = chats.prompt_parts(
                chat_history, template, add_generation_prompt=add_generation_prompt
            )
        except ValueError as error:
            raise BadArgsError(str(error)) from error
        if not add_generation_prompt:
            last = chat_history[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)]
        self._starts[text] = starts
        return text

    @property
    def tokenizer_name(self) -> str:
        """Name for lm-eval's cache of requests."""
        return f"mjax-{self._opened.tokenizer.digest}"

    def get_model_info(self) -> dict[str, Any]:
        """Return metadata of the model for lm-eval's results."""
        return {
            "model_name": self._opened.name,
            "model_num_parameters": num_params(
                dataclasses.replace(self._opened.model, vocab_multiple=1)
            ),
            "model_dtype": self._precision,
            "max_length": self.max_length,
            "tokenizer_digest": self._opened.tokenizer.digest,
            "start_ids": list(self._opened.start_ids),
            "seed": self._args.seed,
        }


def _rows(args: Args, opened: Opened) -> int | None:
    """Return the sequences per batch, rounded up to a multiple of dp; None: auto."""
    if args.batch_size is None:
        return None
    tp = opened.mesh.shape["tp"]
    num_dp = opened.mesh.size // tp
    return -(-args.batch_size // num_dp) * num_dp
