"""The run's configuration: a composition of the parts' own configs."""

import dataclasses

from mjax.ckpt.manager import CkptConfig
from mjax.data.dataset import DataConfig
from mjax.mesh.axes import MeshConfig
from mjax.mesh.distributed import DistributedConfig
from mjax.metrics import LogConfig
from mjax.model import ModelConfig
from mjax.optim import OptimConfig
from mjax.step import BatchConfig, EvalConfig, PrecisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that defines a training run."""

    work_dir: str | None = None
    """Run folder; the same command with it resumes. None: runs/<recipe>-<time>."""
    steps: int = 100
    """Optimizer steps in all."""
    seed: int = 0
    """The one seed for initialisation, data order and dropout."""
    simulate_devices: int | None = None
    """Run on this many simulated CPU devices."""
    zero: int = 2
    """Sharded over dp_shard: 0 nothing, 1 optimizer, 2 gradients, 3 parameters."""
    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device, for MFU; None looks the device up."""
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    batch: BatchConfig = BatchConfig()
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    ckpt: CkptConfig = CkptConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
