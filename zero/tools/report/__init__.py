"""`zero report`: what `json_monitor` wrote about one run or two, as one HTML page without
network.
"""
