"""x"""

from zero.watch.brief import BriefRun


class MemoryRun(BriefRun):
    pass
