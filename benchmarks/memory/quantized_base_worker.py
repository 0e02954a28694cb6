"""A rank of `benchmarks.memory.quantized_base`: the folder of the model, the base, the engine."""

import sys

from benchmarks.memory.quantized_base import work

if __name__ == "__main__":
    work(*sys.argv[1:])
