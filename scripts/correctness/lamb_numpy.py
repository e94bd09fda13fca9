"""LAMB in float64 NumPy, written from the paper, as a reference.

Source: You et al. 2020, arXiv:1904.00962, Algorithm 2, phi the identity. For a layer
with parameters x and gradient g, at step t = 1, 2, ...:

    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
    m_hat = m / (1 - beta1^t)              v_hat = v / (1 - beta2^t)
    r = m_hat / (sqrt(v_hat) + eps)
    x = x - lr * ||x|| / ||r + lambda x|| * (r + lambda x)

The paper leaves 0 / 0 open: here the ratio is 1 when either norm is zero, as in Optax.
"""

import numpy as np
from numpy.typing import ArrayLike


class LambLayer:
    """One layer in the paper's sense: one tensor with one trust ratio."""

    def __init__(
        self,
        x: ArrayLike,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ):
        self.x = np.array(x, np.float64)
        self.m = np.zeros_like(self.x)
        self.v = np.zeros_like(self.x)
        self.t = 0
        self.beta1, self.beta2 = beta1, beta2
        self.eps, self.weight_decay = eps, weight_decay

    def step(self, g: ArrayLike, lr: float) -> None:
        """Update `x`, float64 in the shape of g."""
        g = np.asarray(g, np.float64)
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m_hat = self.m / (1 - self.beta1**self.t)
        v_hat = self.v / (1 - self.beta2**self.t)
        direction = m_hat / (np.sqrt(v_hat) + self.eps) + self.weight_decay * self.x
        x_norm = np.sqrt(np.sum(self.x**2))
        direction_norm = np.sqrt(np.sum(direction**2))
        either_is_zero = x_norm == 0 or direction_norm == 0
        ratio = 1.0 if either_is_zero else x_norm / direction_norm
        self.x = self.x - lr * ratio * direction
