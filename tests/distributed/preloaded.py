"""What every rank of a test needs, imported once by the server that ranks are forked from."""

from __future__ import annotations

import os
import warnings

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (torch.optim imports it at the first step)

import megarl.algorithms.choose  # noqa: E402
import megarl.checkpoint.store  # noqa: E402
import megarl.data.relayout  # noqa: E402
import megarl.metrics.reduce  # noqa: E402
import megarl.models.critic  # noqa: E402
import megarl.models.policy  # noqa: E402
import megarl.models.reference  # noqa: E402
import megarl.models.reward  # noqa: E402
import megarl.models.setup  # noqa: E402, F401

torch.set_num_threads(1)
