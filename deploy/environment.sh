# shellcheck shell=bash
# What NCCL, libfabric and jax read from the environment of a rank. The batch scripts
# source it before anything starts; edit it, and keep it equal on all hosts.
# `python -m mjax.doctor --together` compares the memory fraction and NCCL's algorithms,
# not the networks: NCCL_IB_*, NCCL_NET, NCCL_SOCKET_IFNAME, FI_*. What is not set here has its default,
# which NCCL chooses by the hardware that it finds. Sources:
#   NCCL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
#   libfabric: fi_efa(7); its plugin for NCCL: https://github.com/aws/aws-ofi-nccl
#   jax: https://docs.jax.dev/en/latest/gpu_memory_allocation.html

# ---------------------------------------------------------------------------- all hosts
# Name the device and the reason when a connection fails. INFO says which transport each
# pair of GPUs uses: turn it on once, look for NET/IB (or AWS Libfabric), turn it off.
export NCCL_DEBUG=WARN

# The interface of the first connections, not of the data. Where hosts have several, NCCL
# takes the first that is up, which may be a bridge of a container runtime.
# export NCCL_SOCKET_IFNAME=eth0            # EDIT

# Of a GPU's memory, what jax takes at once: its default is 0.75. What is left over is for
# CUDA, NCCL's buffers and cuDNN. `mjax plan` says what a run needs. The value is read
# before any flag, so it stands here.
export XLA_CLIENT_MEM_FRACTION=0.92

# --------------------------------------------------------------------- InfiniBand, RoCE
# How long a lost packet is waited for: 4.096 us x 2^20 x 7 tries = 30 s by default. A
# link that flaps comes back within that, and training goes on (MegaScale, section 3.6).
# export NCCL_IB_TIMEOUT=22                 # 2 min: where switches reconverge slowly
# export NCCL_IB_HCA="=mlx5_0,mlx5_1"       # EDIT: where some adapters are for storage
# export NCCL_IB_GID_INDEX=3                # RoCE v2, where its GID has another index
# export NCCL_IB_TC=106                     # RoCE: the class that switches keep lossless

# ---------------------------------------------------------------------------------- EFA
# On AWS the plugin of NCCL sets what it needs itself (aws-ofi-nccl, platform-aws.cpp):
# the provider, and safety when a process forks. On a host where the plugin does not start,
# NCCL uses TCP without a word, also where FI_PROVIDER is set. Where the network is named,
# such a host fails at once.
# export NCCL_NET="AWS Libfabric"
# export LD_LIBRARY_PATH=/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib:${LD_LIBRARY_PATH:-}

# --------------------------------------------------------------------------------- mjax
# Compiled steps, so that a host that joins late need not compile: a shared folder.
# export XDG_CACHE_HOME=/shared/cache       # EDIT
