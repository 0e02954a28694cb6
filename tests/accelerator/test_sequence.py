"""Sequences that two ranks with simulated accelerators share: the numbers of one process on the
CPU.
"""

from tests.dist.training import relative
from tests.parity.test_sequence import Case, reference, share
from tests.processes import run_on


def test_shared_sequences_are_those_of_one_process():
    case = Case(3, "sdpa")
    shared = run_on(2, share, [case], simulated=True)
    losses, norms = reference(2, case._replace(stage=0))
    for found_losses, found_norms in (found[0] for found in shared):
        assert relative(found_losses, [each for (each,) in losses]) < 1e-6
        assert relative(found_norms, norms) < 1e-6
