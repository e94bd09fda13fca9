"""Compare each rank with its peers in the same step.

Input: values by step and rank, and groups of ranks. Output: the excess of each rank
over the usual value of its groups. The usual value is the lower median, because half of
a small group may be slow, and slow ranks only have larger values.
"""

import numpy as np
from jaxtyping import Float, Int


def low_median(
    values: Float[np.ndarray, "T R"], group: Int[np.ndarray, " R"]
) -> Float[np.ndarray, "T R"]:
    """Return the usual value of each rank's group in each step; NaN is left out."""
    found = np.empty_like(values)
    for each in np.unique(group):
        columns = np.flatnonzero(group == each)
        ordered = np.sort(values[:, columns], axis=1)  # NaN comes last
        count = (~np.isnan(ordered)).sum(axis=1)
        middle = np.maximum(count - 1, 0) // 2
        found[:, columns] = np.take_along_axis(ordered, middle[:, None], axis=1)
    return found


def shortest(values: Float[np.ndarray, "T R"], group: Int[np.ndarray, " R"]) -> float:
    """Return the median over steps and groups of the smallest value in a group."""
    least = []
    for each in np.unique(group):
        some = values[:, group == each]
        some = some[~np.isnan(some).all(axis=1)]
        least.append(np.nanmin(some, axis=1))
    together = np.concatenate(least)
    return float(np.median(together)) if len(together) else 0.0


def residual(
    values: Float[np.ndarray, "T R"],
    *,
    host: Int[np.ndarray, " R"],
    stage: Int[np.ndarray, " R"],
    replica: Int[np.ndarray, " R"],
) -> Float[np.ndarray, "T R"]:
    """Return the values minus the usual values of the stage and of the replica.

    If any replica is on one host, no value of a replica is subtracted: the effects of
    its sequence lengths and of its host's speed are indistinguishable. If any stage is
    on one host, the usual value of all ranks is subtracted instead of the stage's.
    """
    has_stages, has_replicas = (
        all(len(np.unique(host[group == each])) > 1 for each in np.unique(group))
        for group in (stage, replica)
    )
    everyone = np.zeros_like(stage)
    found = values - low_median(values, stage if has_stages else everyone)
    if len(np.unique(replica)) > 1 and len(np.unique(stage)) > 1 and has_replicas:
        for _ in range(2):
            found = found - low_median(found, replica)
            found = found - low_median(found, stage)
    return found
