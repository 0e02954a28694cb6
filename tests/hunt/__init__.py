import os

# As many times as many models and uses are drawn, and files damaged.
TIMES = int(os.environ.get("ZERO_TEST_HUNT", "1"))
