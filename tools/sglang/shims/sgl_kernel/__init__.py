"""A stand-in for SGLang's CUDA kernels, for machines without a GPU.

SGLang imports names from this package at module level and, on a CPU without AMX, never calls them: its own torch code
takes over. Whoever does call one is told.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return absent
