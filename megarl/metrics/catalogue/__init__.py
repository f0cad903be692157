"""Every metric of megarl, one entry each.

To add a metric, add an entry to the file that fits and run ``python tools/metrics_reference.py``, which rewrites
docs/metrics.md.

Formulas: TM is the mean over tokens that the policy sampled (``loss_mask`` 1), SM the mean over sequences of each one's
TM; d = log π_θ - log π_old and r = exp(d), both of a sampled token during the update.
"""

from __future__ import annotations

from megarl.metrics.catalogue import rollouts, system, training
from megarl.metrics.catalogue.metric import Metric

__all__ = ["CATALOGUE", "Metric"]

CATALOGUE: tuple[Metric, ...] = (*training.ENTRIES, *rollouts.ENTRIES, *system.ENTRIES)
