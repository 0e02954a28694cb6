"""Runs a script of this project with DeepSpeed on CPUs. `zero.hf.enable()` in the script then
does nothing.

torchrun --nproc_per_node 2 -m benchmarks.compatibility.without_hook run_translation.py ARGS...
"""

import os
import runpy
import sys

import deepspeed

import zero.hf

if __name__ == "__main__":
    zero.hf.enable = lambda: None
    # DeepSpeed's Init assumes one rank until its comm module is set up. On CPUs accelerate does not
    # set it up.
    deepspeed.init_distributed(dist_backend="gloo")
    sys.argv = sys.argv[1:]
    # As `python SCRIPT` does: modules of the script's folder can be imported.
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
