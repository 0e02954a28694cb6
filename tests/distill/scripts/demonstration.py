"""run_distill.py's demonstration on a corpus that is small enough for a test.

demonstration.py ARGUMENTS...
"""

import run_distill
from examples.demonstration import distillation
from examples.demonstration.standard_library import Corpus

LINES = [f"def add_{i}(a, b):\n    return a + b + {i}\n" * 9 for i in range(40)]


if __name__ == "__main__":
    distillation.standard_library = lambda: Corpus(LINES[:36], LINES[36:])
    run_distill.main()
