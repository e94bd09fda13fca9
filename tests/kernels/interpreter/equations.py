"""Equations of a kernel that jax's interpreter does not support, or ignores.

- `pl.run_state` (over `plgpu.ACC.init(x)`): would be executed as plain JAX, where its
  body has no meaning.
- `acc[...] = x`, a store to an accumulator: likewise.
- `plgpu.wgmma_wait(n)`: does nothing, because there every wgmma is finished at once.
- `plgpu.commit_smem_to_gmem_group()`: does nothing, because there a copy has no group.
"""

import functools
import itertools
import types

from jax._src import callback, source_info_util
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import core as mosaic_gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import discharge
from jax._src.state import types as state_types

from tests.kernels.interpreter import bulk_groups, wgmma

Interpreter = jaxpr_interpret.JaxprInterpreter
_stock_interpret = Interpreter.interpret


def interpret(self, jaxpr, token, *args):
    """Interpret a jaxpr. Replaces `JaxprInterpreter.interpret`.

    The equations listed above are interpreted here. Runs of other equations go to jax's
    own interpreter, which calls this function for inner jaxprs.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jax_core.Literal) else env[atom]

    for ours, group in itertools.groupby(jaxpr.eqns, lambda e: e.primitive in _RULES):
        eqns = list(group)
        if not ours:
            token, outputs = _interpret_stock(self, eqns, token, env)
            env.update(outputs)
            continue
        for eqn in eqns:
            info = eqn.source_info
            with source_info_util.user_context(
                info.traceback, name_stack=info.name_stack
            ):
                rule = _RULES[eqn.primitive]
                token, values = rule(self, eqn, token, *map(read, eqn.invars))
            env.update(zip(eqn.outvars, values, strict=True))
    return token, [read(v) for v in jaxpr.outvars]


def _interpret_stock(self, eqns, token, env):
    """Interpret equations with jax's interpreter, as a separate jaxpr."""
    defined = [
        v for e in eqns for v in e.outvars if not isinstance(v, jax_core.DropVar)
    ]
    inner = set(defined)
    read = {
        v: env[v]
        for e in eqns
        for v in e.invars
        if not isinstance(v, jax_core.Literal) and v not in inner
    }
    part = types.SimpleNamespace(
        constvars=[], invars=list(read), eqns=eqns, outvars=defined
    )
    token, values = _stock_interpret(self, part, token, *read.values())
    return token, zip(defined, values, strict=True)


def _call(self, eqn, function, token, result=(), **arguments):
    """Call a function of `wgmma` or `bulk_groups` when the kernel runs."""
    return callback.io_callback(
        functools.partial(function, source_info=eqn.source_info),
        (gpu_callbacks.TOKEN_SHAPE_DTYPE, *result),
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        **arguments,
    )


def _wgmma_wait(self, eqn, token):
    (token,) = _call(self, eqn, wgmma.wait, token, n=eqn.params["n"])
    return token, []


def _commit_group(self, eqn, token):
    (token,) = _call(self, eqn, bulk_groups.commit, token)
    return token, []


def _accumulator_store(self, eqn, token, acc, value):
    (token,) = _call(
        self,
        eqn,
        wgmma.store_accumulator,
        token,
        acc_allocation_key_as_array=acc,
        value=value,
    )
    return token, [value]


def _run_state(self, eqn, token, *values):
    """Put initial values into accumulators, interpret the body, wait, read them."""
    assert all(eqn.params["is_initialized"])
    jaxpr = eqn.params["jaxpr"]
    # A ref among the results is one that the body closes over: it has its key already.
    is_new = [not isinstance(v.aval, state_types.AbstractRef) for v in eqn.outvars]
    keys = []
    for value, new in zip(values, is_new, strict=True):
        if new:
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token,
                compute_unit=self.thread,
                memory_space_id=memory.get_memory_space_idx(
                    mosaic_gpu_core.MemorySpace.REGS
                ),
                initial_ref_count=1,
            )
            token, value = gpu_callbacks.call_allocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_request_as_array=request,
                value=value,
                source_info=eqn.source_info,
            )
        keys.append(value)
    token, _ = self.interpret(jaxpr, token, *keys)
    results = []
    for key, new, out in zip(keys, is_new, eqn.outvars, strict=True):
        if new:
            token, result = _call(
                self,
                eqn,
                functools.partial(wgmma.read_accumulator, wait_n=0),
                token,
                [out.aval],
                acc_allocation_key_as_array=key,
            )
            token = gpu_callbacks.call_deallocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_key_as_array=key,
                source_info=eqn.source_info,
            )
        else:
            result = key
        results.append(result)
    return token, results


_RULES = {
    discharge.run_state_p: _run_state,
    gpu_primitives.wgmma_accumulator_store_p: _accumulator_store,
    gpu_primitives.wgmma_wait_p: _wgmma_wait,
    gpu_primitives.commit_group_p: _commit_group,
}
