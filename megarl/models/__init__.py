"""Everything that touches Megatron-Core: building, running, training and exporting the models of a run."""

from megarl.models.cpu import install

# Before any module of this package imports Megatron-Core; does nothing where CUDA is present.
install()
