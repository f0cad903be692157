"""Package metadata. Versions are pinned in one place, `constraints.txt`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PINS = dict(re.findall(r"^([A-Za-z0-9_.\-]+)==(\S+)$", (HERE / "constraints.txt").read_text(), flags=re.MULTILINE))


def pinned(*names: str) -> list[str]:
    """``name[extra]`` -> ``name[extra]==version`` from the matrix."""
    return [f"{name}=={PINS[name.partition('[')[0]]}" for name in names]


setup(
    name="megarl",
    version=re.search(r'__version__ = "(.+)"', (HERE / "megarl/__init__.py").read_text()).group(1),
    description="Reinforcement learning for language models on Megatron-Core, from a laptop to a cluster",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    include_package_data=True,
    package_data={"megarl.report": ["assets/*", "assets/uplot/*"]},
    install_requires=pinned(
        "torch",
        "megatron-core",
        "aiohttp",
        "Jinja2",
        "math-verify",
        "numpy",
        "psutil",
        "pyarrow",
        "pydantic",
        "PyYAML",
        "safetensors",
        "tokenizers",
        "tqdm",
    ),
    extras_require={
        "trackers": pinned("tensorboard", "wandb", "swanlab[dashboard]"),
        "ray": pinned("ray[default]"),
        "gpu": pinned("transformer-engine[pytorch]", "sglang"),
        "dev": pinned(
            "tensorboard",
            "wandb",
            "swanlab[dashboard]",
            "transformers",
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "pre-commit",
            "types-PyYAML",
            "types-psutil",
            "types-tqdm",
        ),
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
