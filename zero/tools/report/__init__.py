"""`zero report` makes an HTML page, which needs no network, from what `json_monitor` wrote about
one run or two.
"""
