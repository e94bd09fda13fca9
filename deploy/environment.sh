# shellcheck shell=bash
# Environment variables of a rank for NCCL, libfabric and jax. The batch scripts source
# this file before anything starts. Edit it, and keep it equal on all hosts.
# `python -m mjax.doctor --together` compares the memory fraction and NCCL's algorithms,
# but no network variables: NCCL_IB_*, NCCL_NET, NCCL_SOCKET_IFNAME, FI_*. Unset variables
# have their defaults, which NCCL chooses by the hardware that it finds. Sources:
#   NCCL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
#   libfabric: fi_efa(7); its plugin for NCCL: https://github.com/aws/aws-ofi-nccl
#   jax: https://docs.jax.dev/en/latest/gpu_memory_allocation.html

# ---------------------------------------------------------------------------- all hosts
# WARN names the device and the reason when a connection fails. INFO prints the transport
# of each pair of GPUs: turn it on once, look for NET/IB (or AWS Libfabric), turn it off.
export NCCL_DEBUG=WARN

# Interface of the first connections, not of the data. If a host has several, NCCL uses
# the first that is up, which may be a bridge of a container runtime.
# export NCCL_SOCKET_IFNAME=eth0            # EDIT

# Fraction of GPU memory that jax allocates at the start; jax's default is 0.75. The rest
# is for CUDA, NCCL's buffers and cuDNN. `mjax plan` reports the memory of a run. jax reads
# the value before any flag, so it is set here.
export XLA_CLIENT_MEM_FRACTION=0.92

# --------------------------------------------------------------------- InfiniBand, RoCE
# Timeout of a lost packet: 4.096 us x 2^20 x 7 tries = 30 s by default. A flapping link
# recovers within this time, and training goes on (MegaScale, section 3.6).
# export NCCL_IB_TIMEOUT=22                 # 2 min: if switches reconverge slowly
# export NCCL_IB_HCA="=mlx5_0,mlx5_1"       # EDIT: if some adapters are for storage
# export NCCL_IB_GID_INDEX=3                # RoCE v2, if its GID has another index
# export NCCL_IB_TC=106                     # RoCE: the lossless class of the switches

# ---------------------------------------------------------------------------------- EFA
# On AWS the NCCL plugin sets its own variables (aws-ofi-nccl, platform-aws.cpp): the
# provider, and safety when a process forks. If the plugin does not start on a host, NCCL
# silently uses TCP, even if FI_PROVIDER is set. If the network is named, such a host
# fails at once.
# export NCCL_NET="AWS Libfabric"
# export LD_LIBRARY_PATH=/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib:${LD_LIBRARY_PATH:-}

# --------------------------------------------------------------------------------- mjax
# Shared folder for compiled steps, so that a host that joins late need not compile.
# export XDG_CACHE_HOME=/shared/cache       # EDIT
