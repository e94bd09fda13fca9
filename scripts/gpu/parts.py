"""The parts of the report, in the order in which they run."""

from types import MappingProxyType

from scripts.gpu.setting import Part

PARTS = MappingProxyType(
    {
        part.name: part
        for part in (
            Part(
                name="correctness",
                title="Kernels on the device against references",
                path="scripts.gpu.correctness",
                timeout_s=150,
                processes=6,
            ),
            Part(
                name="ceilings",
                title="What the machine can do",
                path="scripts.gpu.ceilings",
                timeout_s=60,
            ),
            Part(
                name="attention",
                title="Attention against cuDNN and others",
                path="scripts.gpu.attention",
                timeout_s=150,
                processes=6,
            ),
            Part(
                name="kernels",
                title="The kernels of attention",
                path="scripts.gpu.kernel_times",
                timeout_s=60,
            ),
            Part(
                name="layers",
                title="Norms, non-linearities and cross-entropy",
                path="scripts.gpu.layers",
                timeout_s=60,
            ),
            Part(
                name="training",
                title="Training steps of gpt-1b3 on one GPU",
                path="scripts.gpu.training",
                timeout_s=180,
            ),
            Part(
                name="stamps",
                title="Stamps: the clock, and what they cost",
                path="scripts.gpu.stamp_times",
                timeout_s=240,
            ),
        )
    }
)
