"""Names of flags in other trainers, with the mjax flag of the same meaning.

An unknown flag, or an unknown key of a config file, is looked up in this table. Names
are lower case with hyphens, without the prefixes of other programs (`training.`,
`trainer.`). A value is an mjax flag, or a sentence if no flag has the same meaning.

Each group of names is from the source above it. A name that is in no group is matched
by its spelling.
"""

_BATCH = (
    "--batch.size is the number of sequences on all devices together, and "
    "--batch.microbatches the number of microbatches"
)
_EPOCHS = (
    "--steps sets the length of a run: one step reads --batch.size x --data.seq-len "
    "tokens, and the data repeat in another order after one epoch"
)
_RESUME = "--work-dir DIR alone resumes the run in DIR"
_DEVICES = (
    "a run uses all devices of its hosts, divided by --mesh.dp, --mesh.tp and "
    "--mesh.pp; --simulate-devices N simulates N on a CPU; CUDA_VISIBLE_DEVICES hides "
    "GPUs"
)
_NODES = (
    "python -m mjax.launch --hosts N -- FLAGS starts the processes of N hosts; if you "
    "start processes yourself, give each --distributed.num-processes"
)
_BF16 = (
    "--precision.compute bfloat16 is the default, except in the recipes debug and "
    "demo, which compute in float32"
)
_FP16 = "float16 is not supported; use --precision.compute bfloat16"
_FP8 = (
    "--precision.matmul fp8 runs the projections in FP8 (e4m3 forward, e5m2 for "
    "gradients, current scaling)"
)
_FSDP = (
    "--zero 3 shards parameters, gradients and optimizer state over --mesh.dp-shard "
    "devices; 2 all but the parameters, 1 the optimizer state"
)
_REMAT = (
    "--model.remat sets what the backward pass recomputes: none, attention, core, "
    "dots or full"
)
_TRACK = "--track sends the metrics to tensorboard, wandb or mlflow"
_COMPILE = "every step is compiled; no flag is needed"
_SEQUENCE = "activations between layers are always sharded over --mesh.tp"
_NO_CP = "context parallelism is not supported; --mesh.tp shards long sequences"
_NO_EP = "mixture-of-experts models are not supported"
_WARMUP = "--optim.warmup-steps is a number of steps"
_SAVE_TIME = "--ckpt.every counts steps"
_HF = "--init-from DIR starts from the model of a run or a Hugging Face folder"

# Megatron-LM at d98e8a64, megatron/training/arguments.py and training/config.
_MEGATRON: dict[str, str] = {
    "train-iters": "--steps",
    "train-samples": _EPOCHS,
    "global-batch-size": "--batch.size",
    "micro-batch-size": _BATCH,
    "min-lr": "--optim.final-lr-fraction",
    "lr-decay-style": "--optim.schedule",
    "lr-wsd-decay-iters": "--optim.decay-fraction",
    "lr-warmup-iters": "--optim.warmup-steps",
    "lr-warmup-fraction": _WARMUP,
    "optimizer": "--optim.name",
    "adam-beta1": "--optim.beta1",
    "adam-beta2": "--optim.beta2",
    "adam-eps": "--optim.eps",
    "clip-grad": "--optim.clip-norm",
    "tensor-model-parallel-size": "--mesh.tp",
    "pipeline-model-parallel-size": "--mesh.pp",
    "num-layers-per-virtual-pipeline-stage": "--pipeline.chunks",
    "num-virtual-stages-per-pipeline-rank": "--pipeline.chunks",
    "num-distributed-optimizer-instances": "--mesh.dp-shard",
    "use-torch-fsdp2": _FSDP,
    "use-megatron-fsdp": _FSDP,
    "use-distributed-optimizer": _FSDP,
    "sequence-parallel": _SEQUENCE,
    "context-parallel-size": _NO_CP,
    "expert-model-parallel-size": _NO_EP,
    "num-experts": _NO_EP,
    "tp-comm-overlap": "--mesh.tp-overlap",
    "distributed-timeout-minutes": "--distributed.timeout-s",
    "bf16": _BF16,
    "fp16": _FP16,
    "fp8-format": _FP8,
    "fp8-recipe": _FP8,
    "recompute-activations": _REMAT,
    "recompute-granularity": "--model.remat",
    "recompute-method": "--model.remat",
    "cpu-offloading": "--model.remat offload keeps activations on the host",
    "use-flash-attn": "--model.attention",
    "attention-backend": "--model.attention",
    "num-layers": "--model.layers",
    "hidden-size": "--model.d-model",
    "ffn-hidden-size": "--model.d-ff",
    "num-attention-heads": "--model.heads",
    "num-query-groups": "--model.kv-heads",
    "group-query-attention": "--model.kv-heads",
    "kv-channels": "--model.head-dim",
    "make-vocab-size-divisible-by": "--model.vocab-multiple",
    "window-size": "--model.window",
    "rotary-base": "--model.rope-base",
    "rotary-percent": "--model.rope-fraction",
    "rotary-interleaved": "--model.rope-interleaved",
    "max-position-embeddings": "--data.seq-len",
    "normalization": "--model.norm",
    "norm-epsilon": "--model.norm-eps",
    "hidden-dropout": "--model.dropout",
    "attention-dropout": "--model.dropout",
    "untie-embeddings-and-output-weights": "--model.tie-embeddings",
    "init-method-std": "--model.init-std",
    "data-path": "--data.path",
    "train-data-path": "--data.path",
    "data-cache-path": "--data.cache-dir",
    "seq-length": "--data.seq-len",
    "split": "--data.held-out-fraction",
    "tokenizer-type": "--data.tokenizer",
    "tokenizer-model": "--data.tokenizer",
    "mock-data": "--data.path synthetic trains on synthetic text",
    "load": _RESUME,
    "save": "--work-dir",
    "save-interval": "--ckpt.every",
    "eval-interval": "--eval.every",
    "eval-iters": "--eval.batches",
    "log-interval": "--log.every",
    "tensorboard-dir": _TRACK,
    "wandb-project": "--track wandb reads the environment variable WANDB_PROJECT",
    "wandb-entity": "--track wandb reads the environment variable WANDB_ENTITY",
    "profile": "--profile.steps",
    "profile-step-start": "--profile.steps",
    "log-straggler": "python -m mjax.observe finds stragglers of any run",
}

# torchtitan at b5bcd76c, torchtitan/config and torchtitan/components.
_TORCHTITAN: dict[str, str] = {
    "min-lr-factor": "--optim.final-lr-fraction",
    "decay-ratio": "--optim.decay-fraction",
    "decay-type": "--optim.schedule",
    "max-norm": "--optim.clip-norm",
    "local-batch-size": _BATCH,
    "tensor-parallel-degree": "--mesh.tp",
    "pipeline-parallel-degree": "--mesh.pp",
    "pipeline-parallel-schedule": "--pipeline.schedule",
    "pipeline-parallel-layers-per-stage": "--pipeline.chunks",
    "data-parallel-replicate-degree": "--mesh.dp-shard",
    "data-parallel-shard-degree": "--mesh.dp-shard",
    "context-parallel-degree": _NO_CP,
    "expert-parallel-degree": _NO_EP,
    "enable-async-tensor-parallel": "--mesh.tp-overlap",
    "mixed-precision-param": "--precision.compute",
    "mixed-precision-reduce": "--precision.reduce",
    "initial-load-path": _HF,
    "dataset": "--data.path",
    "dump-folder": "--work-dir",
    "keep-latest-k": "--ckpt.keep",
    "log-freq": "--log.every",
    "enable-tensorboard": _TRACK,
    "enable-wandb": _TRACK,
    "enable-profiling": "--profile.steps",
    "compile": _COMPILE,
}

# transformers 5.23 (TrainingArguments, and keys of config.json).
_TRANSFORMERS: dict[str, str] = {
    "learning-rate": "--optim.lr",
    "lr-scheduler-type": "--optim.schedule",
    "optim": "--optim.name",
    "adam-epsilon": "--optim.eps",
    "max-grad-norm": "--optim.clip-norm",
    "max-steps": "--steps",
    "num-train-epochs": _EPOCHS,
    "data-seed": "--seed",
    "per-device-train-batch-size": _BATCH,
    "per-device-eval-batch-size": "--eval.batches",
    "gradient-accumulation-steps": "--batch.microbatches",
    "fsdp": _FSDP,
    "deepspeed": _FSDP,
    "gradient-checkpointing": _REMAT,
    "torch-compile": _COMPILE,
    "resume-from-checkpoint": _RESUME,
    "output-dir": "--work-dir",
    "run-name": "--work-dir",
    "save-steps": "--ckpt.every",
    "save-strategy": _SAVE_TIME,
    "save-total-limit": "--ckpt.keep",
    "load-best-model-at-end": "--ckpt.keep-best",
    "eval-steps": "--eval.every",
    "logging-steps": "--log.every",
    "report-to": _TRACK,
    "num-hidden-layers": "--model.layers",
    "intermediate-size": "--model.d-ff",
    "num-key-value-heads": "--model.kv-heads",
    "sliding-window": "--model.window",
    "rms-norm-eps": "--model.norm-eps",
    "hidden-act": "--model.activation",
    "tie-word-embeddings": "--model.tie-embeddings",
    "initializer-range": "--model.init-std",
    "attn-logit-softcapping": "--model.attn-soft-cap",
    "final-logit-softcapping": "--model.logit-soft-cap",
}

# torchrun (torch/distributed/run.py), and PEFT's LoraConfig.
_LAUNCHED: dict[str, str] = {
    "nnodes": _NODES,
    "nproc-per-node": _DEVICES,
    "node-rank": "--distributed.process-id",
    "master-addr": "--distributed.coordinator",
    "lora-alpha": "--lora.alpha",
    "target-modules": "--lora.targets",
}

# litgpt at 02f2fca4, litgpt/args.py; nanoGPT at 005475c4, train.py.
_SMALL_TRAINERS: dict[str, str] = {
    "epochs": _EPOCHS,
    "max-tokens": _EPOCHS,
    "max-seq-length": "--data.seq-len",
    "lr-warmup-steps": "--optim.warmup-steps",
    "max-iters": "--steps",
    "warmup-iters": "--optim.warmup-steps",
    "n-layer": "--model.layers",
    "n-head": "--model.heads",
    "n-embd": "--model.d-model",
    "block-size": "--data.seq-len",
    "batch-size": "--batch.size",
    "grad-clip": "--optim.clip-norm",
    "out-dir": "--work-dir",
    "dtype": "--precision.compute",
    "device": _DEVICES,
}

# SMP v2, core feature configuration parameters (docs.aws.amazon.com).
_SMP: dict[str, str] = {
    "hybrid-shard-degree": "--mesh.dp-shard",
    "sm-activation-offloading": "--model.remat offload keeps activations on the host",
    "activation-loading-horizon": "--model.offload-horizon",
    "random-seed": "--seed",
}

# Words that are no flag of a certain trainer.
_WORDS: dict[str, str] = {
    "resume": _RESUME,
    "gpus": _DEVICES,
    "width": "--model.d-model",
    "depth": "--model.layers",
    "wandb": _TRACK,
    "tensorboard": _TRACK,
    "mlflow": _TRACK,
    "fp8": _FP8,
    "lora-rank": "--lora.rank",
}

OTHER_NAMES: dict[str, str] = {
    **_MEGATRON,
    **_TORCHTITAN,
    **_TRANSFORMERS,
    **_LAUNCHED,
    **_SMALL_TRAINERS,
    **_SMP,
    **_WORDS,
}
"""Name elsewhere -> flag or sentence."""
