"""Runs a script of this project on the real DeepSpeed, on CPUs: `zero.hf.enable()` in it does nothing.

torchrun --nproc_per_node 2 -m benchmarks.without_hook run_translation.py ARGS...
"""

import os
import runpy
import sys

import deepspeed

import zero.hf

if __name__ == "__main__":
    zero.hf.enable = lambda: None
    # Its Init takes the world for one rank until its own comm module is set up, which accelerate does not do on CPUs.
    deepspeed.init_distributed(dist_backend="gloo")
    sys.argv = sys.argv[1:]
    # as `python SCRIPT` does: the script's folder is where its own modules are found
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
