"""Repeats a step that ran out of memory, with less of it (`"on_out_of_memory": "adapt"`).

adaptation    what is changed, and when a step is repeated
call          one forward of the script, which can be repeated
"""

from zero.adapting.adaptation import KEY, Adaptation

__all__ = ["KEY", "Adaptation"]
