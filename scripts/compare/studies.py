"""What is compared: the arms of each study, their rates and seeds, and the sizes.

Nothing here runs. An arm is one configuration, trained with several learning rates and
seeds; a comparison names two arms. All arms of a study see the same number of tokens,
apart from arms that say otherwise. Runs of one seed share the order of the sequences
and, where the shapes of the parameters agree, the initial parameters.
"""

import dataclasses
import hashlib

SEEDS = (0, 1, 2)
OTHER_SEEDS = (3, 4, 5)
NUM_EVALS = 8
"""Evaluations of a run, the last one after its last step."""
HELD_OUT_ROWS = 128
"""Held-out sequences of each evaluation; the same for every run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large the models and the runs of a study are."""

    name: str
    flags: tuple[str, ...]
    """Of the model and the data."""
    seq_len: int
    rows: int
    """Sequences of a batch of an arm with batch factor 1."""
    tokens: int
    """Of each run with token share 1."""
    about: str
    """One sentence for the page: layers, width, corpus, tokenizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One configuration, and the rates and seeds it is trained with."""

    name: str
    """For commands and folders."""
    label: str
    flags: tuple[str, ...]
    rates: tuple[float, ...]
    """Peak learning rates, rising; the grid is extended if the best is at an edge."""
    seeds: tuple[int, ...] = SEEDS
    batch_factor: int = 1
    """Batch in units of the size's batch."""
    token_share: float = 1.0
    """Tokens in units of the size's tokens."""
    large_flags: tuple[str, ...] = ()
    """What differs from `gpt-1b3` in the command for 1.3B parameters."""
    large_name: str | None = None
    """Of the arm in that command, where the roles are swapped; None: `name`."""
    large_rates: tuple[float, ...] = ()
    """Rates of that command; none: the study has no such command."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two arms by name; a difference is that of `arm` minus that of `against`."""

    title: str
    arm: str
    against: str
    is_null: bool = False
    """Both arms are the same configuration, so nothing may separate them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs and what is concluded from it."""

    name: str
    title: str
    text: str
    """For the page: what is particular about the study."""
    arms: tuple[Arm, ...]
    """In the order of training: null arms early, so that no verdict lacks one."""
    comparisons: tuple[Comparison, ...]
    sizes: tuple[Size, ...]
    """The first one is the default."""

    def arm(self, name: str) -> Arm:
        """Return an arm by its name."""
        return next(arm for arm in self.arms if arm.name == name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of the grid."""

    arm: Arm
    size: Size
    rate: float
    seed: int

    @property
    def steps(self) -> int:
        """Steps in which the run sees its tokens."""
        rows = self.size.rows * self.arm.batch_factor
        return int(self.size.tokens * self.arm.token_share) // (
            rows * self.size.seq_len
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of the trainer, without its work dir; they identify the run."""
        rows = self.size.rows * self.arm.batch_factor
        every = -(-self.steps // NUM_EVALS)
        return (
            *self.size.flags,
            *self.arm.flags,
            *("--data.seq-len", str(self.size.seq_len), "--batch.size", str(rows)),
            *("--steps", str(self.steps), "--seed", str(self.seed)),
            *("--optim.lr", f"{self.rate:g}"),
            *("--optim.warmup-steps", str(max(1, self.steps // 10))),
            *("--eval.every", str(every), "--eval.batches", str(HELD_OUT_ROWS // rows)),
            *("--ckpt.every", str(self.steps), "--log.every", str(every)),
            *("--log.sample-tokens", "0"),
        )

    @property
    def key(self) -> str:
        """The flags in one line, under which the result is kept."""
        return " ".join(self.flags)

    @property
    def folder(self) -> str:
        """Name of the work dir."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:8]
        return f"{self.arm.name}-{self.rate:g}-{self.seed}-{digest}"


# All layers alike: the recipe leaves positions out of every fourth.
_FULL = ("--model.rope", "True", "--model.window", "None")
_ADAMW, _LAMB = ("--optim.name", "adamw"), ("--optim.name", "lamb")
_FLOAT32, _BFLOAT16 = (
    ("--precision.compute", "float32"),
    ("--precision.compute", "bfloat16"),
)
_BASE = (*_FULL, "--model.block", "parallel", *_ADAMW, *_FLOAT32)
_BASE_RATES = (2e-3, 5e-3, 1.25e-2)
_LARGE_RATES = (1e-4, 2e-4, 4e-4)
_LARGE_BATCH = ("--batch.size", "2048", "--batch.microbatches", "16", "--steps", "6500")
_LARGE_BATCH += ("--optim.warmup-steps", "500")

_SMALL_FLAGS = (
    *("--model.layers", "4", "--model.d-model", "64", "--model.heads", "4"),
    *("--model.d-ff", "176", "--data.tokenizer", "train:1024"),
)
_NIGHT_FLAGS = (
    *("--model.layers", "4", "--model.d-model", "128", "--model.heads", "4"),
    *("--model.d-ff", "352", "--data.tokenizer", "train:1024"),
)
_CORPUS = (
    "the Python sources of the standard library in tokens of a byte-level BPE of 1,024"
)

CONVERGENCE = Study(
    name="convergence",
    title="Convergence: block, window, optimizer, precision",
    text=(
        "The reference is a parallel block with full attention, AdamW and float32. "
        "Each other arm differs from it in one thing; the window is a quarter of the "
        "sequence. Jiang et al. 2024 (MegaScale, arXiv:2402.15627, section 3.1 and "
        "figure 10) compare losses of a 13B model for a parallel block, a window and "
        "LAMB at 4 times the batch; here the models are far smaller, and bfloat16 is "
        "added. At 4 times the batch a run has a quarter of the steps."
    ),
    arms=(
        Arm(
            name="reference",
            label="reference",
            flags=_BASE,
            rates=_BASE_RATES,
            large_rates=_LARGE_RATES,
        ),
        Arm(
            name="null",
            label="reference, other seeds",
            flags=_BASE,
            rates=_BASE_RATES,
            seeds=OTHER_SEEDS,
        ),
        Arm(
            name="serial",
            label="serial block",
            flags=(*_BASE, "--model.block", "serial"),
            rates=_BASE_RATES,
            large_flags=("--model.block", "serial"),
            large_rates=_LARGE_RATES,
        ),
        Arm(
            name="window",
            label="window of seq/4",
            flags=(*_BASE, "--model.window", "128"),
            rates=_BASE_RATES,
            large_flags=("--model.window", "512"),
            large_rates=_LARGE_RATES,
        ),
        Arm(
            name="lamb-4x",
            label="LAMB, 4 x batch",
            flags=(*_BASE, *_LAMB),
            rates=(1.5e-2, 3e-2, 6e-2),
            batch_factor=4,
            large_flags=(*_LAMB, *_LARGE_BATCH),
            large_rates=(2e-3, 4e-3, 8e-3),
        ),
        Arm(
            name="adamw-4x",
            label="AdamW, 4 x batch",
            flags=_BASE,
            rates=(3e-3, 8e-3, 2e-2),
            batch_factor=4,
            large_flags=_LARGE_BATCH,
            large_rates=(2e-4, 4e-4, 8e-4),
        ),
        Arm(
            name="bfloat16",
            label="bfloat16",
            flags=(*_BASE, *_BFLOAT16),
            rates=_BASE_RATES,
            large_name="float32",
            large_flags=(*_FLOAT32, "--batch.microbatches", "8"),
            large_rates=_LARGE_RATES,
        ),
    ),
    comparisons=(
        Comparison(
            title="serial block against parallel block",
            arm="serial",
            against="reference",
        ),
        Comparison(
            title="window of a quarter against full attention",
            arm="window",
            against="reference",
        ),
        Comparison(
            title="LAMB at 4 x batch against AdamW at 1 x",
            arm="lamb-4x",
            against="reference",
        ),
        Comparison(
            title="LAMB against AdamW, both at 4 x batch",
            arm="lamb-4x",
            against="adamw-4x",
        ),
        Comparison(
            title="bfloat16 against float32", arm="bfloat16", against="reference"
        ),
        Comparison(
            title="null: the reference with other seeds against itself",
            arm="null",
            against="reference",
            is_null=True,
        ),
    ),
    sizes=(
        Size(
            name="hour",
            flags=_SMALL_FLAGS,
            seq_len=512,
            rows=2,
            tokens=2**20,
            about=f"4 layers of width 64 (0.27 million parameters) on {_CORPUS}",
        ),
        Size(
            name="night",
            flags=_NIGHT_FLAGS,
            seq_len=512,
            rows=4,
            tokens=2**23,
            about=f"4 layers of width 128 (1.1 million parameters) on {_CORPUS}",
        ),
    ),
)

_FP8 = (*_BFLOAT16, "--precision.matmul", "fp8")
# 4 times the parameters of the blocks of the demo model.
_LARGER = (
    *("--model.layers", "8", "--model.d-model", "192"),
    *("--model.heads", "6", "--model.d-ff", "512"),
)
_FP8_RATES = (5e-3, 1e-2, 2e-2)

FP8 = Study(
    name="fp8",
    title="Convergence: FP8 matmuls",
    text=(
        "The larger model has 8 layers of width 192 and half the tokens. Operands of "
        "the projections are quantised as on a GPU (e4m3, gradients e5m2, a scale for "
        "each tensor from its largest value) and multiplied in bfloat16, which holds "
        "each of their values; compute is bfloat16 in all runs."
    ),
    arms=(
        Arm(
            name="demo-bf16", label="demo, bfloat16", flags=_BFLOAT16, rates=_FP8_RATES
        ),
        Arm(
            name="null",
            label="demo, bfloat16, other seeds",
            flags=_BFLOAT16,
            rates=_FP8_RATES,
            seeds=OTHER_SEEDS,
        ),
        Arm(name="demo-fp8", label="demo, FP8", flags=_FP8, rates=_FP8_RATES),
        Arm(
            name="larger-bf16",
            label="larger, bfloat16",
            flags=(*_BFLOAT16, *_LARGER),
            rates=_FP8_RATES,
            token_share=0.5,
        ),
        Arm(
            name="larger-fp8",
            label="larger, FP8",
            flags=(*_FP8, *_LARGER),
            rates=_FP8_RATES,
            token_share=0.5,
        ),
    ),
    comparisons=(
        Comparison(
            title="demo: FP8 against bfloat16", arm="demo-fp8", against="demo-bf16"
        ),
        Comparison(
            title="larger: FP8 against bfloat16",
            arm="larger-fp8",
            against="larger-bf16",
        ),
        Comparison(
            title="null: demo in bfloat16 with other seeds against itself",
            arm="null",
            against="demo-bf16",
            is_null=True,
        ),
    ),
    sizes=(
        Size(
            name="demo",
            flags=(),
            seq_len=128,
            rows=8,
            tokens=409_600,
            about="the model and corpus of the demo",
        ),
    ),
)

STUDIES = {study.name: study for study in (CONVERGENCE, FP8)}
